// SPDX-License-Identifier: Apache-2.0

//! An authority made for one server, its certificate, and those of its clients.

use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use tokio_rustls::rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer},
    server::WebPkiClientVerifier,
};

pub(super) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    /// Certificates issued so far, so that no two are alike.
    issued: u32,
}

/// A client's certificate and key.
pub(super) struct Identity {
    pub(super) certificate: CertificateDer<'static>,
    pub(super) certificate_pem: String,
    pub(super) key_pem: String,
}

impl Authority {
    pub(super) fn new() -> Authority {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "testkit authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(params, key()).expect("the parameters above are valid");
        Authority { issuer, issued: 0 }
    }

    pub(super) fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// A server on loopback that asks for client certificates, but does not insist.
    pub(super) fn server_config(&self) -> ServerConfig {
        let key = key();
        let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let mut params = CertificateParams::new(names).expect("both are valid names");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params.signed_by(&key, &self.issuer).expect("the authority's key can sign");
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).expect("our own authority is valid");
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
            .allow_unauthenticated()
            .build()
            .expect("there is one root");
        let private = PrivateKeyDer::try_from(key.serialize_der()).expect("rcgen writes PKCS #8");
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("ring has the default versions")
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![certificate.der().clone()], private)
            .expect("key and certificate belong together");
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        config
    }

    pub(super) fn issue_client(&mut self) -> Identity {
        self.issued += 1;
        let key = key();
        let mut params = CertificateParams::default();
        let name = format!("system:kube-proxy-{}", self.issued);
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &self.issuer).expect("the authority's key can sign");
        Identity {
            certificate: certificate.der().clone(),
            certificate_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
        }
    }
}

fn key() -> KeyPair {
    KeyPair::generate().expect("the system gives random numbers")
}

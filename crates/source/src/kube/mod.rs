// SPDX-License-Identifier: Apache-2.0

//! The Kubernetes API as a source, by list and watch.
//!
//! The `kube` crate gives configuration, authentication and transport. Lists and watches are done here, because
//! they are streamed, in protobuf, and only the fields in use are decoded: 100,000 endpoints then need little
//! more than the model keeps of them.
//!
//! - `protocol`: what to ask, what an answer means; without IO
//! - `follow`: its driver, one for each kind
//! - `wire`, `pages`: events and lists, as they arrive
//! - `access`: credentials and the client, from `kubeconfig`, `environment` and plugins (`exec`)
//! - `exchange`: requests; `create`: what is written; `release`: of the server
//! - `backoff`, `status`

mod access;
mod backoff;
mod connect;
mod create;
mod environment;
mod exchange;
mod exec;
mod follow;
mod kubeconfig;
mod pages;
mod protocol;
mod release;
mod status;
mod wire;

use std::sync::{Arc, Mutex};

use model::Update;
use tokio::{sync::mpsc::Sender, task::JoinSet};

use self::follow::{Follower, Place, Shared};
pub use self::{
    access::{Access, Error, Settings},
    create::NotCreated,
    environment::Environment,
    exchange::Exchange,
    status::{KindStatus, Status},
};
use crate::{intern::Interner, object, problem::Problems};

/// Tells `out` all there is and then what changes. Returns when nobody receives any more; drop it to stop.
///
/// While the API server is away nothing is told, so nothing is removed.
pub async fn run(
    access: Arc<Access>,
    node_name: Arc<str>,
    problems: Arc<Problems>,
    status: Arc<Status>,
    out: Sender<Update>,
) {
    let node_selector = format!("metadata.name={node_name}");
    let interner = Arc::new(Mutex::new(Interner::default()));
    let shared = Shared { access, status, problems, interner, node_name, out };
    let services = Place {
        paths: &["/api/v1/services"],
        label_selector: "!service.kubernetes.io/service-proxy-name",
        field_selector: "spec.clusterIP!=None".into(),
        may_be_absent: false,
    };
    let slices = Place {
        paths: &["/apis/discovery.k8s.io/v1/endpointslices"],
        label_selector: "!service.kubernetes.io/headless",
        field_selector: String::new(),
        may_be_absent: false,
    };
    let node = Place {
        paths: &["/api/v1/nodes"],
        label_selector: "",
        field_selector: node_selector,
        may_be_absent: false,
    };
    let cidrs = Place {
        paths: &["/apis/networking.k8s.io/v1/servicecidrs", "/apis/networking.k8s.io/v1beta1/servicecidrs"],
        label_selector: "",
        field_selector: String::new(),
        may_be_absent: true,
    };
    let mut tasks = JoinSet::new();
    tasks.spawn(Follower::<object::Node>::new(shared.clone(), node).run());
    tasks.spawn(Follower::<object::ServiceCidr>::new(shared.clone(), cidrs).run());
    tasks.spawn(Follower::<object::Service>::new(shared.clone(), services).run());
    tasks.spawn(Follower::<object::EndpointSlice>::new(shared, slices).run());
    // One ends when nobody receives any more, or by a bug. Either way all end: whoever runs this begins anew, and
    // no kind is left behind.
    tasks.join_next().await;
}

/// Reads arbitrary bytes as the API server's answers; for fuzzing.
#[doc(hidden)]
pub fn fuzz_wire(bytes: &[u8]) {
    use crate::lower::Resource;

    fn read<R: Resource>(format: wire::Format, bytes: &bytes::Bytes) {
        let mut frames = wire::Frames::new(format);
        let mut protocol = protocol::Protocol::new(false);
        protocol.accepted();
        for chunk in bytes.chunks(97) {
            frames.push(&bytes::Bytes::copy_from_slice(chunk));
            while let Ok(Some(event)) = frames.next() {
                let _ = protocol.event(event.heading);
                lower(format.object::<R>(event.object));
            }
        }
        let mut page = pages::Page::new(format);
        for chunk in bytes.chunks(97) {
            page.push(&bytes::Bytes::copy_from_slice(chunk));
            while let Ok(Some(item)) = page.next() {
                lower(item.object::<R>());
            }
        }
        let _ = page.finish();
        lower(format.object::<R>(bytes.clone()));
    }

    fn lower<R: Resource>(object: Result<R, wire::Unreadable>) {
        let Ok(object) = object else { return };
        let mut interner = Interner::default();
        let mut scope = crate::lower::Scope {
            interner: &mut interner,
            node_name: "node",
            report: &mut |problem| drop(problem),
        };
        let _ = object.lower(&mut scope);
        if let Some(metadata) = object.metadata() {
            let _ = R::gone(metadata, &mut scope);
        }
    }

    let bytes = bytes::Bytes::copy_from_slice(bytes);
    for format in [wire::Format::Protobuf, wire::Format::Json] {
        read::<object::Service>(format, &bytes);
        read::<object::EndpointSlice>(format, &bytes);
        read::<object::Node>(format, &bytes);
        read::<object::ServiceCidr>(format, &bytes);
    }
}

// SPDX-License-Identifier: Apache-2.0

use model::{Kind, Update};

use super::{Lowered, Resource, Scope, Subject, parse_cidr};
use crate::{
    object::{self, Metadata},
    problem::Reason,
};

impl Resource for object::ServiceCidr {
    const KIND: Kind = Kind::ServiceCidr;
    const NAME: &'static str = "ServiceCIDR";

    fn metadata(&self) -> Option<&Metadata> {
        self.metadata.as_ref()
    }

    fn lower(&self, scope: &mut Scope<'_>) -> Lowered {
        let nameless = Metadata::default();
        let metadata = self.metadata.as_ref().unwrap_or(&nameless);
        let mut subject = Subject { kind: Self::NAME, metadata, scope };
        if metadata.name().is_empty() {
            subject.problem("", Reason::NoName, "");
            return Lowered::Refused;
        }
        let mut cidrs = Vec::new();
        for (at, text) in self.spec.iter().flat_map(|spec| &spec.cidrs).enumerate() {
            match parse_cidr(text) {
                Some(cidr) => cidrs.push(cidr),
                None => subject.problem(format!("spec.cidrs[{at}]"), Reason::BadCidr, text),
            }
        }
        let name = subject.string(metadata.name());
        Lowered::Object(Update::ServiceCidr { name, cidrs: cidrs.into() })
    }

    fn gone(metadata: &Metadata, scope: &mut Scope<'_>) -> Option<Update> {
        let name = Some(metadata.name()).filter(|name| !name.is_empty())?;
        Some(Update::ServiceCidrGone(scope.interner.string(name)))
    }
}

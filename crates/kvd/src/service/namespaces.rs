//! Contents of each namespace, for whoever operates the daemon.

use super::{CallContext, Service, ServiceError};
use kvd_core::Namespace;
use std::collections::BTreeMap;

/// One namespace of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceDescription {
    /// The tenant.
    pub name: Namespace,
    /// Registered models.
    pub models: u64,
    /// Open sequences.
    pub sequences: u64,
    /// Sessions.
    pub sessions: u64,
    /// Bytes in packed blocks, windows and open blocks.
    pub held_bytes: u64,
    /// Its share of a busy device.
    pub weight: u32,
}

impl Service {
    /// Namespaces that hold something and that are served, by name.
    ///
    /// # Errors
    /// As every call.
    pub fn list_namespaces(
        &self,
        call: &CallContext,
    ) -> Result<Vec<NamespaceDescription>, ServiceError> {
        self.admit_call(call)?;
        let mut found = BTreeMap::new();
        for model in self.models.list_models(None) {
            let usage = self.model_usage(&model);
            let of = self.description_in(&mut found, &model.shape.namespace);
            of.models += 1;
            of.sequences += usage.sequences;
            of.held_bytes += usage.stored.packed_bytes + usage.stored.raw_bytes;
        }
        for namespace in self.sessions.list_namespaces() {
            self.description_in(&mut found, &namespace).sessions += 1;
        }
        let is_told =
            |name: &Namespace| self.config.namespaces.allow_namespace(name) && call.may_use(name);
        Ok(found.into_values().filter(|of| is_told(&of.name)).collect())
    }

    fn description_in<'a>(
        &self,
        found: &'a mut BTreeMap<Namespace, NamespaceDescription>,
        name: &Namespace,
    ) -> &'a mut NamespaceDescription {
        let weight = self.config.weights.get(name).copied().unwrap_or(1);
        found.entry(name.clone()).or_insert_with(|| NamespaceDescription {
            name: name.clone(),
            models: 0,
            sequences: 0,
            sessions: 0,
            held_bytes: 0,
            weight,
        })
    }
}

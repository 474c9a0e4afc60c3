//! Contents and quotas of each namespace, for whoever operates the daemon.

use super::{CallContext, Service, ServiceError};
use crate::metrics::{NamespaceWeight, QuotaLevel};
use crate::quotas::QuotaOrder;
use kvd_core::{ErrorCode, Namespace};
use kvd_store::{NamespaceAccount, QuotaKind};
use std::collections::BTreeMap;
use std::sync::Arc;

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
    /// One of each kind.
    pub quotas: Vec<QuotaDescription>,
}

/// One quota of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaDescription {
    /// Whatever is counted.
    pub kind: QuotaKind,
    /// The amount that the namespace has.
    pub used: u64,
    /// The amount that it may have, if that is limited.
    pub allowed: Option<u64>,
    /// Refusals since the start.
    pub refused: u64,
}

/// Quotas of a namespace after they were changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChangedQuotas {
    pub(crate) quotas: Vec<QuotaDescription>,
    /// Its share of what is shared by weight.
    pub(crate) weight: u32,
    /// Whether they outlive the daemon.
    pub(crate) is_kept: bool,
}

impl Service {
    /// Namespaces that hold something or have quotas or a weight, and that are served, by name.
    ///
    /// # Errors
    /// As every call.
    pub fn list_namespaces(
        &self,
        call: &CallContext,
    ) -> Result<Vec<NamespaceDescription>, ServiceError> {
        self.admit_daemon_call(call)?;
        let mut found = BTreeMap::new();
        for account in self.list_set() {
            self.description_in(&mut found, account.namespace_name());
        }
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
        for of in found.values_mut() {
            of.quotas = self.describe_quotas(&self.quotas.quota_table().open_account(&of.name));
        }
        let is_told =
            |name: &Namespace| self.config.namespaces.allow_namespace(name) && call.may_use(name);
        Ok(found.into_values().filter(|of| is_told(&of.name)).collect())
    }

    /// Changes what a namespace may have.
    ///
    /// # Errors
    /// `NAMESPACE_DENIED` for one that the caller may not use, `INVALID_ARGUMENT`,
    /// `LIMIT_EXCEEDED`, or `INTERNAL` when they cannot be kept; nothing has changed then.
    pub(crate) async fn set_quotas(
        &self,
        call: &CallContext,
        order: QuotaOrder,
    ) -> Result<ChangedQuotas, ServiceError> {
        self.admit_daemon_call(call)?;
        self.check_namespace(&order.namespace)?;
        if !call.may_use(&order.namespace) {
            let message = format!("you may not operate namespace {}", order.namespace);
            return Err(ServiceError::new(ErrorCode::NamespaceDenied, message));
        }
        let quotas = self.quotas.clone();
        let name = order.namespace.clone();
        // It goes on when the caller leaves: what is on disk is in force.
        let changing = tokio::task::spawn_blocking(move || quotas.change_terms(&order));
        changing.await.map_err(|error| {
            ServiceError::new(ErrorCode::Internal, format!("the work ended early: {error}"))
        })??;
        let account = self.quotas.quota_table().open_account(&name);
        let (quotas, weight) = (self.describe_quotas(&account), account.share_weight());
        Ok(ChangedQuotas { quotas, weight, is_kept: self.quotas.is_kept() })
    }

    /// Shows the quotas that there are on the page of metrics.
    pub(super) fn refresh_quotas(&self) {
        let accounts = self.list_set();
        let mut levels = Vec::new();
        let mut weights = Vec::new();
        for account in &accounts {
            let namespace = account.namespace_name().as_str();
            weights.push(NamespaceWeight { namespace, weight: account.share_weight() });
            for quota in self.describe_quotas(account) {
                let QuotaDescription { kind, used, allowed, refused } = quota;
                let level = |allowed| QuotaLevel { namespace, kind, used, allowed, refused };
                levels.extend(allowed.map(level));
            }
        }
        self.metrics.show_quotas(&levels, &weights);
    }

    /// Accounts of namespaces that have quotas or a weight.
    fn list_set(&self) -> Vec<Arc<NamespaceAccount>> {
        let mut accounts = self.quotas.quota_table().list_accounts();
        accounts.retain(|account| account.is_set());
        accounts
    }

    fn describe_quotas(&self, account: &NamespaceAccount) -> Vec<QuotaDescription> {
        let name = account.namespace_name();
        let used = |kind| match kind {
            QuotaKind::Models => self.models.list_models(Some(name)).len() as u64,
            QuotaKind::Sessions => self.sessions.count_of(name) as u64,
            QuotaKind::QueueJobs => {
                self.workers().map(|worker| worker.queued_of(name)).max().unwrap_or(0) as u64
            }
            _ => account.used_amount(kind),
        };
        let describe = |kind| QuotaDescription {
            kind,
            used: used(kind),
            allowed: account.limit_of(kind),
            refused: account.refused_count(kind),
        };
        QuotaKind::ALL.into_iter().map(describe).collect()
    }

    fn description_in<'a>(
        &self,
        found: &'a mut BTreeMap<Namespace, NamespaceDescription>,
        name: &Namespace,
    ) -> &'a mut NamespaceDescription {
        let weight = self.quotas.quota_table().weight_of(name);
        found.entry(name.clone()).or_insert_with(|| NamespaceDescription {
            name: name.clone(),
            models: 0,
            sequences: 0,
            sessions: 0,
            held_bytes: 0,
            weight,
            quotas: Vec::new(),
        })
    }
}

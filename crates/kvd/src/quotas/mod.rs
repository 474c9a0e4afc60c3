//! Quotas and weights of namespaces: what the configuration says, what operators have set instead,
//! and what is in force.
//!
//! Owns [`NamespaceQuotas`]. One mutex guards what operators have set; it is held while the file is
//! written, so that the file, what is in force and the answer agree. Call off the threads that
//! answer requests.

mod file;

use crate::config::{Config, ConfigError};
use crate::service::ServiceError;
use file::QuotaFile;
use kvd_core::{ErrorCode, Namespace};
use kvd_store::{QuotaKind, QuotaLimits, QuotaTable};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Limits of a namespace, and its share of what is shared by weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct NamespaceTerms {
    limits: QuotaLimits,
    /// None where nobody has set one: that of the configuration.
    weight: Option<u32>,
}

/// Terms by namespace.
type TermsByName = BTreeMap<Namespace, NamespaceTerms>;

/// A change of one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitChange {
    pub(crate) kind: QuotaKind,
    /// None for no limit.
    pub(crate) allowed: Option<u64>,
}

/// An operator's wish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QuotaOrder {
    pub(crate) namespace: Namespace,
    /// Goes back to the configuration first.
    pub(crate) reset: bool,
    pub(crate) changes: Vec<LimitChange>,
    /// The new share, 1 at least.
    pub(crate) weight: Option<u32>,
}

/// Quotas of all namespaces.
#[derive(Debug)]
pub(crate) struct NamespaceQuotas {
    table: Arc<QuotaTable>,
    configured: TermsByName,
    /// Weights that are configured: they count against no limit of namespaces.
    weights: HashMap<Namespace, u32>,
    /// Each replaces what is configured of its namespace.
    set: Mutex<TermsByName>,
    file: Option<QuotaFile>,
    namespaces_max: usize,
    /// Bytes of the smallest pool of a device.
    pool_bytes: u64,
}

impl NamespaceQuotas {
    /// Reads what operators have set, and puts quotas in force. `pools` has the bytes of the pool
    /// of each device.
    ///
    /// # Errors
    /// A file that cannot be read or written, or quotas that do not fit the pools.
    pub(crate) fn open_file(config: &Config, pools: &[u64]) -> Result<Self, ConfigError> {
        let (weights, config) = (config.weights.clone(), &config.quotas);
        let file = config.file.clone().map(QuotaFile::new);
        let set = file.as_ref().map(QuotaFile::read_terms).transpose();
        let key = |reason| ConfigError::new("namespaces.quota_file", reason);
        let set = set.map_err(key)?.unwrap_or_default();
        file.as_ref().map_or(Ok(()), QuotaFile::check_writable).map_err(key)?;
        let configured = |(name, limits): (&Namespace, &QuotaLimits)| {
            (name.clone(), NamespaceTerms { limits: *limits, weight: None })
        };
        let quotas = Self {
            table: QuotaTable::new(pools.len()),
            configured: config.limits.iter().map(configured).collect(),
            weights,
            set: Mutex::default(),
            file,
            namespaces_max: config.namespaces_max,
            pool_bytes: pools.iter().copied().min().unwrap_or(0),
        };
        let all = quotas.merge_terms(&set);
        quotas
            .check_limits(&all)
            .map_err(|reason| ConfigError::new("namespaces.quotas", reason))?;
        quotas.weights.iter().for_each(|(name, weight)| quotas.table.set_weight(name, *weight));
        all.iter().for_each(|(name, terms)| quotas.enforce_terms(name, terms));
        *quotas.set.lock() = set;
        Ok(quotas)
    }

    /// The limits in force, and how much is used of them.
    pub(crate) fn quota_table(&self) -> &Arc<QuotaTable> {
        &self.table
    }

    /// Whether changes outlive the daemon.
    pub(crate) fn is_kept(&self) -> bool {
        self.file.is_some()
    }

    fn enforce_terms(&self, name: &Namespace, terms: &NamespaceTerms) {
        self.table.set_limits(name, &terms.limits);
        let configured = || self.weights.get(name).copied().unwrap_or(1);
        self.table.set_weight(name, terms.weight.unwrap_or_else(configured));
    }

    /// Changes the terms of a namespace: what an operator sets replaces what is configured of it.
    /// Once this returns it is kept, if there is a file. Waits for the disk.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, `LIMIT_EXCEEDED`, or `INTERNAL` when the file cannot be written; nothing
    /// has changed then.
    pub(crate) fn change_terms(&self, order: &QuotaOrder) -> Result<(), ServiceError> {
        let mut set = self.set.lock();
        let mut new = set.clone();
        if order.reset {
            new.remove(&order.namespace);
        }
        let configured = self.configured.get(&order.namespace).copied().unwrap_or_default();
        let mut terms = new.get(&order.namespace).copied().unwrap_or(configured);
        for LimitChange { kind, allowed } in &order.changes {
            terms.limits.set_limit(*kind, *allowed);
        }
        terms.weight = order.weight.or(terms.weight);
        if !order.changes.is_empty() || order.weight.is_some() {
            new.insert(order.namespace.clone(), terms);
        }
        let all = self.merge_terms(&new);
        if all.len() > self.namespaces_max && all.len() > self.merge_terms(&set).len() {
            let max = self.namespaces_max;
            let message = format!("{max} namespaces have quotas (namespaces.quotas_max)");
            return Err(ServiceError::new(ErrorCode::LimitExceeded, message));
        }
        let refused = |reason| ServiceError::new(ErrorCode::InvalidArgument, reason);
        self.check_limits(&all).map_err(refused)?;
        if let Some(file) = &self.file {
            file.write_terms(&new).map_err(|error| {
                let message = format!("the quotas cannot be kept, and stay as they were: {error}");
                ServiceError::new(ErrorCode::Internal, message)
            })?;
        }
        self.enforce_terms(&order.namespace, &terms);
        *set = new;
        Ok(())
    }

    /// The terms in force where these are set.
    fn merge_terms(&self, set: &TermsByName) -> TermsByName {
        let mut all = self.configured.clone();
        all.extend(set.iter().map(|(name, terms)| (name.clone(), *terms)));
        all
    }

    /// Whether what is reserved can be had.
    fn check_limits(&self, all: &TermsByName) -> Result<(), String> {
        let mut sum: u64 = 0;
        for (name, NamespaceTerms { limits, .. }) in all {
            let reserved = limits.limit_of(QuotaKind::ReservedBytes).unwrap_or(0);
            sum = sum.saturating_add(reserved);
            let most = limits.limit_of(QuotaKind::PoolBytes).unwrap_or(u64::MAX);
            if reserved > most {
                return Err(format!(
                    "namespace {name}: reserved_bytes {reserved} is above its pool_bytes {most}"
                ));
            }
        }
        if sum > self.pool_bytes {
            let pool = self.pool_bytes;
            return Err(format!(
                "reserved_bytes of all namespaces are {sum} together, above the {pool} bytes of a \
                 device's pool (device.pool_bytes)"
            ));
        }
        Ok(())
    }
}

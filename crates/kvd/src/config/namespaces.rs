//! Settings of `[namespaces]`: who may use the daemon, with which share, and how much of it.

use super::raw::{ConfigError, NamespaceSettings};
use super::{AllowedNamespaces, SizeSetting, at_least, socket_path};
use kvd_core::Namespace;
use kvd_store::{QuotaKind, QuotaLimits};
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

/// Limits of namespaces as they are configured, and where changes of them are kept.
#[derive(Clone, Debug)]
pub struct QuotaConfig {
    /// Namespaces that have limits.
    pub limits: BTreeMap<Namespace, QuotaLimits>,
    /// The file of what operators have set; none: it is forgotten when the daemon ends.
    pub file: Option<PathBuf>,
    /// Namespaces with limits, set or configured.
    pub namespaces_max: usize,
}

impl QuotaConfig {
    pub(super) fn validate_raw(raw: &NamespaceSettings) -> Result<Self, ConfigError> {
        let key = "namespaces.quotas_max";
        let namespaces_max = at_least(key, raw.quotas_max, 1)?;
        let limits = parse_quotas(&raw.quotas)?;
        if limits.len() > namespaces_max {
            let reason = format!("namespaces.quotas has {} namespaces", limits.len());
            return Err(ConfigError::new(key, reason));
        }
        Ok(Self { limits, file: socket_path(&raw.quota_file), namespaces_max })
    }
}

pub(super) fn parse_namespaces(allowed: &[String]) -> Result<AllowedNamespaces, ConfigError> {
    AllowedNamespaces::parse_names(allowed)
        .map_err(|reason| ConfigError::new("namespaces.allowed", reason))
}

/// Largest weight of a namespace.
const WEIGHT_MAX: u32 = 1000;

/// A weight that a namespace may have.
pub(crate) fn check_weight(weight: u32) -> Result<u32, String> {
    let is_one = (1..=WEIGHT_MAX).contains(&weight);
    is_one.then_some(weight).ok_or_else(|| format!("a weight is 1 to {WEIGHT_MAX}, not {weight}"))
}

/// "name=weight" texts.
pub(super) fn parse_weights(texts: &[String]) -> Result<HashMap<Namespace, u32>, ConfigError> {
    let mut weights = HashMap::new();
    for text in texts {
        let wrong = |reason: String| ConfigError::new("namespaces.weights", reason);
        let parsed = text.split_once('=').and_then(|(name, weight)| {
            let weight = check_weight(weight.trim().parse().ok()?).ok()?;
            Some((name.trim(), weight))
        });
        let Some((name, weight)) = parsed else {
            let reason =
                format!("{text:?} is not \"name=weight\" with a weight of 1 to {WEIGHT_MAX}");
            return Err(wrong(reason));
        };
        let name = Namespace::new(name).map_err(|error| wrong(error.to_string()))?;
        if weights.insert(name, weight).is_some() {
            return Err(wrong(format!("{text:?} names a namespace again")));
        }
    }
    Ok(weights)
}

/// "name: quota=amount, quota=amount" texts.
fn parse_quotas(texts: &[String]) -> Result<BTreeMap<Namespace, QuotaLimits>, ConfigError> {
    let mut namespaces = BTreeMap::new();
    for text in texts {
        let wrong =
            |reason: String| ConfigError::new("namespaces.quotas", format!("{text:?}: {reason}"));
        let Some((name, amounts)) = text.split_once(':') else {
            let reason = "is not \"name: quota=amount, …\", such as \"team-a: pool_bytes=2 GiB, \
                          sequences=1000\"";
            return Err(wrong(reason.to_owned()));
        };
        let name = Namespace::new(name.trim()).map_err(|error| wrong(error.to_string()))?;
        let limits = parse_limits(amounts).map_err(wrong)?;
        if namespaces.insert(name, limits).is_some() {
            return Err(wrong("names a namespace again".to_owned()));
        }
    }
    Ok(namespaces)
}

fn parse_limits(texts: &str) -> Result<QuotaLimits, String> {
    let mut limits = QuotaLimits::default();
    for text in texts.split(',') {
        let (name, amount) =
            text.split_once('=').ok_or_else(|| format!("{text:?} is not quota=amount"))?;
        let kind = find_quota(name.trim())?;
        if limits.limit_of(kind).is_some() {
            return Err(format!("{} stands twice", kind.quota_name()));
        }
        limits.set_limit(kind, Some(parse_amount(kind, amount)?));
    }
    Ok(limits)
}

/// The quota of that name.
pub(crate) fn find_quota(name: &str) -> Result<QuotaKind, String> {
    QuotaKind::from_name(name).ok_or_else(|| {
        let known = QuotaKind::ALL.map(QuotaKind::quota_name).join(", ");
        let shown: String = name.chars().take(64).collect();
        format!("there is no quota {shown:?}; there are {known}")
    })
}

/// An amount as people write it: a size where the quota counts bytes, else a number.
pub(crate) fn parse_amount(kind: QuotaKind, text: &str) -> Result<u64, String> {
    let text = text.trim();
    if kind.counts_bytes() {
        return text.parse().map(SizeSetting::as_u64);
    }
    let number = text.parse().ok().filter(|number| *number != u64::MAX);
    number.ok_or_else(|| format!("{text:?} is not a whole number from 0 on"))
}

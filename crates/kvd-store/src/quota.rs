//! Quotas: how much of what is counted by namespace each has, and how much it may have; and each
//! one's weight where several share.
//!
//! Owns [`QuotaTable`], which all devices of a daemon share. A namespace has an account while it
//! has a quota or holds something that is counted; amounts are taken before anything is done and
//! given back when it is undone. Lock story: the table's two locks are held to find, add or list
//! accounts, never together with another; what an account counts is atomic, so that it may be
//! changed under any lock.

use kvd_core::{Coded, ErrorCode, Namespace};
use parking_lot::RwLock;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// How long whoever waits for something to be given back waits before asking again.
const RETRY_AFTER: Duration = Duration::from_millis(250);

/// Weight of a namespace that has none of its own.
const DEFAULT_WEIGHT: u32 = 1;

/// Stands for no limit.
const UNLIMITED: u64 = u64::MAX;

/// A kind of amount that is counted by namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum QuotaKind {
    /// Bytes of the pools of all devices.
    PoolBytes,
    /// Bytes of the pool of each device that others cannot take: a floor, not a limit.
    ReservedBytes,
    /// Bytes of cached blocks in the pools, those that open sequences share included.
    CacheBytes,
    /// Bytes of cached blocks that are on disk or on their way there, of registered models.
    DiskBytes,
    /// Open sequences.
    Sequences,
    /// Registered models.
    Models,
    /// Sessions.
    Sessions,
    /// Bytes of requests and answers at once.
    InflightBytes,
    /// Calls that wait for a device, of attends and of all else each.
    QueueJobs,
}

impl QuotaKind {
    /// All of them, in the order in which they are shown.
    pub const ALL: [Self; 9] = [
        Self::PoolBytes,
        Self::ReservedBytes,
        Self::CacheBytes,
        Self::DiskBytes,
        Self::Sequences,
        Self::Models,
        Self::Sessions,
        Self::InflightBytes,
        Self::QueueJobs,
    ];

    /// Name in the configuration, on the wire and in metrics.
    #[must_use]
    pub const fn quota_name(self) -> &'static str {
        match self {
            Self::PoolBytes => "pool_bytes",
            Self::ReservedBytes => "reserved_bytes",
            Self::CacheBytes => "cache_bytes",
            Self::DiskBytes => "disk_bytes",
            Self::Sequences => "sequences",
            Self::Models => "models",
            Self::Sessions => "sessions",
            Self::InflightBytes => "inflight_bytes",
            Self::QueueJobs => "queue_jobs",
        }
    }

    /// The kind of that [`QuotaKind::quota_name`].
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.quota_name() == name)
    }

    /// Whether it counts bytes.
    #[must_use]
    pub const fn counts_bytes(self) -> bool {
        matches!(
            self,
            Self::PoolBytes
                | Self::ReservedBytes
                | Self::CacheBytes
                | Self::DiskBytes
                | Self::InflightBytes
        )
    }

    /// Says what makes room, for people.
    const fn describe_remedy(self) -> &'static str {
        match self {
            Self::PoolBytes | Self::ReservedBytes => "close or truncate sequences of it",
            Self::CacheBytes | Self::DiskBytes => "drop cached blocks of it",
            Self::Sequences => "close sequences of it",
            Self::Models => "unregister a model of it",
            Self::Sessions => "close a session of it",
            Self::InflightBytes | Self::QueueJobs => "wait for answers to calls of it",
        }
    }
}

/// Limits of one namespace: those that it has not are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaLimits([Option<u64>; QuotaKind::ALL.len()]);

impl QuotaLimits {
    /// The limit, if there is one.
    #[must_use]
    pub fn limit_of(&self, kind: QuotaKind) -> Option<u64> {
        self.0[kind as usize]
    }

    /// Sets a limit, or takes it away.
    pub fn set_limit(&mut self, kind: QuotaKind, limit: Option<u64>) {
        self.0[kind as usize] = limit;
    }
}

/// A namespace has as much as it may.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "namespace {namespace} has {used} of the {allowed} that its quota {} allows, and asked for \
     {asked} more; {}, or ask who operates the daemon for more (kvd namespaces set)",
    kind.quota_name(),
    kind.describe_remedy()
)]
pub struct QuotaExceeded {
    /// Whose quota it is.
    pub namespace: Namespace,
    /// The kind of amount.
    pub kind: QuotaKind,
    /// The amount that it has.
    pub used: u64,
    /// The amount that the call would have added.
    pub asked: u64,
    /// The amount that it may have.
    pub allowed: u64,
}

impl Coded for QuotaExceeded {
    fn code(&self) -> ErrorCode {
        ErrorCode::QuotaExceeded
    }

    fn retry_hint(&self) -> Option<Duration> {
        // A model is not given back by waiting, nor is there ever room for more than all of it.
        let waits = self.kind != QuotaKind::Models && self.asked <= self.allowed;
        waits.then_some(RETRY_AFTER)
    }
}

/// One namespace's amounts.
pub struct NamespaceAccount {
    namespace: Namespace,
    limits: [AtomicU64; QuotaKind::ALL.len()],
    used: [AtomicU64; QuotaKind::ALL.len()],
    refused: [AtomicU64; QuotaKind::ALL.len()],
    weight: AtomicU32,
    /// Bytes of the pool of each device.
    on_device: Box<[AtomicU64]>,
}

impl NamespaceAccount {
    fn new(namespace: Namespace, devices: usize) -> Self {
        Self {
            namespace,
            limits: std::array::from_fn(|_| AtomicU64::new(UNLIMITED)),
            used: Default::default(),
            refused: Default::default(),
            weight: AtomicU32::new(DEFAULT_WEIGHT),
            on_device: (0..devices.max(1)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Whose account it is.
    #[must_use]
    pub fn namespace_name(&self) -> &Namespace {
        &self.namespace
    }

    /// Its share of a device's time and of the cache, beside others'.
    #[must_use]
    pub fn share_weight(&self) -> u32 {
        self.weight.load(Relaxed)
    }

    /// The amount that the namespace may have.
    #[must_use]
    pub fn limit_of(&self, kind: QuotaKind) -> Option<u64> {
        let limit = self.limits[kind as usize].load(Relaxed);
        (limit != UNLIMITED).then_some(limit)
    }

    /// The amount that this account counts: none of kinds that are counted elsewhere.
    #[must_use]
    pub fn used_amount(&self, kind: QuotaKind) -> u64 {
        match kind {
            QuotaKind::ReservedBytes => {
                let held = self.on_device.iter().map(|held| held.load(Relaxed));
                held.max().unwrap_or(0)
            }
            _ => self.used[kind as usize].load(Relaxed),
        }
    }

    /// Calls that were refused, or publishes that ended, because of this quota.
    #[must_use]
    pub fn refused_count(&self, kind: QuotaKind) -> u64 {
        self.refused[kind as usize].load(Relaxed)
    }

    /// Takes an amount, if it may.
    #[must_use]
    pub fn try_take(&self, kind: QuotaKind, amount: u64) -> bool {
        let limit = self.limits[kind as usize].load(Relaxed);
        let add = |used: u64| used.checked_add(amount).filter(|sum| *sum <= limit);
        self.used[kind as usize].fetch_update(Relaxed, Relaxed, add).is_ok()
    }

    /// Takes an amount that is there already, whatever the quota says.
    pub fn take_anyway(&self, kind: QuotaKind, amount: u64) {
        self.used[kind as usize].fetch_add(amount, Relaxed);
    }

    /// Gives back what was taken.
    pub fn give_back(&self, kind: QuotaKind, amount: u64) {
        self.used[kind as usize].fetch_sub(amount, Relaxed);
    }

    /// Whether there is room for more, where the caller counts what is used.
    ///
    /// # Errors
    /// [`QuotaExceeded`], which is counted.
    pub fn check_room(&self, kind: QuotaKind, used: u64, asked: u64) -> Result<(), QuotaExceeded> {
        match self.limit_of(kind) {
            Some(allowed) if used.saturating_add(asked) > allowed => {
                Err(self.count_refusal(kind, used, asked))
            }
            _ => Ok(()),
        }
    }

    /// The refusal of an amount that [`NamespaceAccount::try_take`] did not give.
    pub fn refuse_amount(&self, kind: QuotaKind, asked: u64) -> QuotaExceeded {
        self.count_refusal(kind, self.used_amount(kind), asked)
    }

    fn count_refusal(&self, kind: QuotaKind, used: u64, asked: u64) -> QuotaExceeded {
        self.refused[kind as usize].fetch_add(1, Relaxed);
        let allowed = self.limits[kind as usize].load(Relaxed);
        QuotaExceeded { namespace: self.namespace.clone(), kind, used, asked, allowed }
    }

    /// Bytes that are reserved for it on a device and that it does not use.
    pub(crate) fn unused_reserve(&self, device: usize) -> u64 {
        let reserved = self.limit_of(QuotaKind::ReservedBytes).unwrap_or(0);
        reserved.saturating_sub(self.on_device[device].load(Relaxed))
    }

    /// Takes bytes of a device's pool, if it may.
    pub(crate) fn try_take_pool(&self, device: usize, bytes: u64) -> bool {
        let may = self.try_take(QuotaKind::PoolBytes, bytes);
        if may {
            self.on_device[device].fetch_add(bytes, Relaxed);
        }
        may
    }

    /// Gives bytes of a device's pool back.
    pub(crate) fn give_pool(&self, device: usize, bytes: u64) {
        self.on_device[device].fetch_sub(bytes, Relaxed);
        self.give_back(QuotaKind::PoolBytes, bytes);
    }

    fn set_limits(&self, limits: &QuotaLimits) {
        for kind in QuotaKind::ALL {
            let limit = limits.limit_of(kind).unwrap_or(UNLIMITED);
            self.limits[kind as usize].store(limit, Relaxed);
        }
    }

    /// Whether somebody has given it a limit or a weight.
    #[must_use]
    pub fn is_set(&self) -> bool {
        let is_limited = QuotaKind::ALL.into_iter().any(|kind| self.limit_of(kind).is_some());
        is_limited || self.share_weight() != DEFAULT_WEIGHT
    }

    /// Whether it says nothing that a new one would not say.
    fn is_idle(&self) -> bool {
        !self.is_set() && self.used.iter().all(|used| used.load(Relaxed) == 0)
    }
}

impl fmt::Debug for NamespaceAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NamespaceAccount")
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// An amount that was taken; dropping it gives it back.
#[derive(Debug)]
#[must_use = "dropping a share gives it back"]
pub struct QuotaShare {
    account: Arc<NamespaceAccount>,
    kind: QuotaKind,
    amount: u64,
}

impl QuotaShare {
    /// Takes an amount, if the namespace may have it.
    #[must_use]
    pub fn try_new(account: &Arc<NamespaceAccount>, kind: QuotaKind, amount: u64) -> Option<Self> {
        let share = || Self { account: Arc::clone(account), kind, amount };
        account.try_take(kind, amount).then(share)
    }
}

impl Drop for QuotaShare {
    fn drop(&mut self) {
        self.account.give_back(self.kind, self.amount);
    }
}

/// Accounts of all namespaces.
#[derive(Debug)]
pub struct QuotaTable {
    devices: usize,
    accounts: RwLock<HashMap<Namespace, Arc<NamespaceAccount>>>,
    /// Those for which bytes are reserved.
    reserving: RwLock<Arc<[Arc<NamespaceAccount>]>>,
}

impl QuotaTable {
    /// A table without quotas, for so many devices.
    #[must_use]
    pub fn new(devices: usize) -> Arc<Self> {
        let reserving = RwLock::new(Arc::from([]));
        Arc::new(Self { devices, accounts: RwLock::default(), reserving })
    }

    /// Replaces the limits of a namespace. What it has beyond them stays.
    pub fn set_limits(&self, namespace: &Namespace, limits: &QuotaLimits) {
        let mut accounts = self.accounts.write();
        Self::add_account(&mut accounts, namespace, self.devices).set_limits(limits);
        let reserves =
            |account: &&Arc<NamespaceAccount>| account.limit_of(QuotaKind::ReservedBytes).is_some();
        let reserving: Vec<_> = accounts.values().filter(reserves).cloned().collect();
        drop(accounts);
        *self.reserving.write() = reserving.into();
    }

    /// Sets a namespace's share of what namespaces share by weight.
    pub fn set_weight(&self, namespace: &Namespace, weight: u32) {
        let mut accounts = self.accounts.write();
        let account = Self::add_account(&mut accounts, namespace, self.devices);
        account.weight.store(weight.max(1), Relaxed);
    }

    /// The share of a namespace, 1 where nobody has set another.
    #[must_use]
    pub fn weight_of(&self, namespace: &Namespace) -> u32 {
        self.accounts.read().get(namespace).map_or(DEFAULT_WEIGHT, |of| of.share_weight())
    }

    /// The account of a namespace, if it has one.
    #[must_use]
    pub fn find_account(&self, namespace: &Namespace) -> Option<Arc<NamespaceAccount>> {
        self.accounts.read().get(namespace).cloned()
    }

    /// The account of a namespace, which has one from now on.
    #[must_use]
    pub fn open_account(&self, namespace: &Namespace) -> Arc<NamespaceAccount> {
        if let Some(account) = self.find_account(namespace) {
            return account;
        }
        Self::add_account(&mut self.accounts.write(), namespace, self.devices).clone()
    }

    /// All accounts, by name.
    #[must_use]
    pub fn list_accounts(&self) -> Vec<Arc<NamespaceAccount>> {
        let mut accounts: Vec<_> = self.accounts.read().values().cloned().collect();
        accounts.sort_by(|a, b| a.namespace.as_str().cmp(b.namespace.as_str()));
        accounts
    }

    /// Those for which bytes are reserved.
    pub(crate) fn list_reserving(&self) -> Arc<[Arc<NamespaceAccount>]> {
        self.reserving.read().clone()
    }

    /// Adds an account, and forgets those that nobody needs: names are as many as clients make.
    fn add_account<'a>(
        accounts: &'a mut HashMap<Namespace, Arc<NamespaceAccount>>,
        namespace: &Namespace,
        devices: usize,
    ) -> &'a Arc<NamespaceAccount> {
        if !accounts.contains_key(namespace) {
            accounts.retain(|_, account| Arc::strong_count(account) > 1 || !account.is_idle());
        }
        let new = || Arc::new(NamespaceAccount::new(namespace.clone(), devices));
        accounts.entry(namespace.clone()).or_insert_with(new)
    }
}

/// The table, as the pool of one device sees it.
#[derive(Clone, Debug)]
pub struct DeviceQuotas {
    /// Accounts of all devices.
    pub table: Arc<QuotaTable>,
    /// Number of the device, from 0.
    pub device: usize,
}

impl Default for DeviceQuotas {
    fn default() -> Self {
        Self { table: QuotaTable::new(1), device: 0 }
    }
}

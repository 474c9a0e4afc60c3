//! The seam between the tier and stores: what any store of objects can do.

use bytes::Bytes;
use std::future::Future;
use std::pin::Pin;

/// Answer of a store, later.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreFailure>> + Send + 'a>>;

/// Why a store did not do as it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreFailure {
    /// It has no room, and says so: a Redis whose `maxmemory-policy` is `noeviction`.
    #[error("the store is full: {0}")]
    Full(String),
    /// It does not let us in, or its clock and ours are too far apart.
    #[error("the store refuses us: {0}")]
    Denied(String),
    /// All else: no connection, a broken one, an error of the server's.
    #[error("the store failed: {0}")]
    Failed(String),
}

/// A store of objects. Requests may be dropped at any time; the tier bounds each by a deadline.
pub trait RemoteStore: Send + Sync {
    /// How many objects are there, from the first on, up to the first that is not.
    fn count_present<'a>(&'a self, paths: &'a [String]) -> StoreFuture<'a, usize>;

    /// An object's bytes; none where there is no such object. One of more than `bytes_max` is not
    /// read in full.
    fn read_object<'a>(&'a self, path: &'a str, bytes_max: u64) -> StoreFuture<'a, Option<Bytes>>;

    /// Writes an object, whole or not at all; one that is there is replaced.
    fn write_object<'a>(&'a self, path: &'a str, bytes: Bytes) -> StoreFuture<'a, ()>;

    /// Removes an object; one that is not there is removed already.
    fn remove_object<'a>(&'a self, path: &'a str) -> StoreFuture<'a, ()>;
}

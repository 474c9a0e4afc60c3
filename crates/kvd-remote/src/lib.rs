//! The remote tier of the cache: records of cached blocks in a store that daemons share.
//!
//! One object a block, all layers and tables in it, under a name that follows from scope, position
//! and key alone ([`name_object`]): two daemons that write one object write either of two right
//! contents. Nothing rests on conditional writes, clocks or listings. Every request has a deadline,
//! every queue a limit, and after a row of failures a [`StoreBreaker`] answers for a while without
//! asking. Whatever is read is verified: checksums, scope, position and key, and a keyed hash where
//! the daemons share a secret ([`MacKey`]).
//!
//! The crate knows records and stores; it never sees the index, gRPC or a device. It runs on the
//! caller's tokio. Locks are held to move values in or out, never across an await.
#![forbid(unsafe_code)]

mod breaker;
mod levels;
mod name;
#[cfg(feature = "objects")]
mod object_store_client;
#[cfg(feature = "redis")]
mod redis_client;
mod settings;
mod store;
mod tier;
mod uploads;

#[cfg(test)]
mod tests;

pub use breaker::{BreakerState, StoreBreaker};
pub use levels::{RemoteLevels, RemoteOp, RequestCounts};
pub use name::{MacKey, MacKeyError, name_object};
pub use settings::{RemoteSettings, RemoteUrl, SettingsError};
pub use store::{RemoteStore, StoreFailure, StoreFuture};
pub use tier::{OnRequest, ReadFailure, RemoteTier};
pub use uploads::{OnUploaded, RefusedUpload};

//! Tools that the tests of several crates share. Nothing here is in a product.
//!
//! - [`conformance`]: one suite for every backend, against f64 attention over decoded rows;
//!   [`mount_conformance`] makes it tests, one for each codec.
//! - [`forward`]: a backend that hands calls on to another one, and fails where a test says.
//! - [`reference`], [`budget`]: attention as the textbook writes it, and how far an answer may be
//!   from it.
//! - [`rows`], [`rng`]: a model's shape, its rows, and numbers that are equal in every run.
//! - [`hostile`]: what fuzzing does with bytes.
//! - [`calls`], [`gpu_worker`]: calls of a daemon, and a process that shares its memory.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test may fail")]

#[cfg(feature = "service")]
pub mod budget;
#[cfg(feature = "service")]
pub mod calls;
pub mod conformance;
pub mod forward;
#[cfg(feature = "service")]
pub mod gpu_worker;
pub mod hostile;
#[cfg(feature = "service")]
pub mod reference;
pub mod rng;
pub mod rows;

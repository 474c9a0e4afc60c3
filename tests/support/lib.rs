//! Actors and yardsticks of the end-to-end tests: a daemon in this process, the engines that talk
//! to it over real sockets, a plain reference of attention, and the error budget between them.
//!
//! Nothing here looks inside the daemon: what a test sees, a user sees.
#![forbid(unsafe_code)]

pub mod budget;
pub mod codec;
pub mod daemon;
pub mod engine;
pub mod fixture;
pub mod metrics;
pub mod wait;

pub use budget::assert_within_budget;
pub use daemon::{TestDaemon, daemon};
pub use engine::{StoredSequence, TestEngine, assert_refused, engine};
pub use kvd_testkit::reference::{self, BatchAnswer, QueryBatch};
pub use kvd_testkit::rng::{self, TestRng};
pub use kvd_testkit::rows::{self, LayerRows, ModelShape};

//! Measurement of one codec through a daemon over gRPC: the parts that the demo, the evaluation and
//! the search share.

mod attached;
mod attention_error;
mod daemon;
mod latency;
mod reference;
mod rig;
mod speed;
mod storage;
mod through_kvd;

pub use attached::{AttachedPrefix, AttachedQuality, QualityPair};
pub use attention_error::{AttentionError, LayerError};
pub use daemon::{DeviceMeans, MetricsSource};
pub use latency::{CallSummaries, LatencySummary};
pub use speed::DeviceSpeed;
pub use storage::StorageRatios;

pub(crate) use attention_error::CleanWindow;
pub(crate) use reference::PassageReference;
pub(crate) use rig::{CodecRegistration, CodecRun, MeasureRig};
pub(crate) use through_kvd::KvdAttention;

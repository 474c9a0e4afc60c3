//! Rust client of the kvd daemon.
//!
//! A [`Client`] is a handle on one connection: clone it freely and call it from many tasks. Every
//! rpc of `kvd.v1` is one typed method; a failure is a [`ClientError`] that says whether the same
//! call may succeed later, and whether the daemon was [`DaemonRestart`], which voids every id.
//! Engines that hold the newest tokens themselves merge the daemon's part with theirs through
//! [`merge`]. A [`HeldSession`] owns sequences, so that a client that dies leaves none behind. A
//! worker on the daemon's machine may share a [`RegionClient`] of memory with it.
//!
//! ```no_run
//! use bytes::Bytes;
//! use kvd_client::{AttendBatch, AttendQuery, Client, DType, Geometry, LayerIndex, ModelSpec};
//! use kvd_client::{RopePairing, StoreChunk};
//!
//! # async fn run(k: Bytes, v: Bytes, q: Bytes) -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::connect("http://127.0.0.1:7070".parse()?).await?;
//! let geometry = Geometry {
//!     layers: 32,
//!     kv_heads: 8,
//!     head_dim_k: 128,
//!     head_dim_v: 128,
//!     block_tokens: 0, // the daemon's default
//!     dtype: DType::F16,
//!     rope_pairing: RopePairing::Half,
//! };
//! let spec = ModelSpec {
//!     name: "llama-8b".into(),
//!     geometry,
//!     codec: "kivi-4".into(),
//!     calibration: Bytes::new(),
//! };
//! let model = client.register_model(spec).await?.model;
//! let sequence = client.open_sequence(model).await?;
//!
//! // 100 tokens of layer 0, then one query token that sees them all.
//! let layer = LayerIndex(0);
//! client.store_chunk(StoreChunk { sequence, layer, start: 0, tokens: 100, k, v }).await?;
//! let attended = client
//!     .attend_batch(AttendBatch {
//!         model,
//!         layer,
//!         q_heads: 32,
//!         dtype: DType::F16,
//!         scale: None,
//!         soft_cap: None,
//!         queries: vec![AttendQuery::new(sequence, 1)],
//!         q,
//!         per_query_errors: false,
//!     })
//!     .await?;
//! assert_eq!(attended.lse.len(), 32);
//! client.close_sequence(sequence).await?;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod boot;
mod cache;
mod client;
mod connect;
mod endpoint;
mod error;
pub mod merge;
mod region;
mod region_control;
mod region_layout;
mod region_options;
mod ring;
mod secrets;
mod session;
mod stream;
mod watch;

pub use cache::{MatchedPrefixes, OpenedPrefix, OpeningTerms};
pub use client::{Client, LoadedRows};
pub use connect::ClientOptions;
pub use endpoint::{Endpoint, EndpointError};
pub use error::{ClientError, DaemonRestart};
pub use region::{
    CallProgress, RegionClient, RegionDevice, RegionKind, RegionOptions, RegionSlice,
};
pub use region_control::{ControlCalls, RegionSession};
pub use region_layout::{AttendLayout, QUERY_ERROR_BYTES};
pub use ring::{AttendRing, RingLayout, RingOptions, RingReply};
pub use secrets::{BearerToken, ClientIdentity, TlsOptions};
pub use session::{HeldSession, SessionOptions};
pub use stream::{AttendStream, LoadStream, PIPELINE_DEPTH_MAX, StoreStream};
pub use watch::{BlockWatch, WatchPosition};

pub use kvd_shm::ring::RingRows;

pub use kvd_core::{
    DType, ErrorCode, Geometry, LayerIndex, LeaseId, ModelId, Namespace, NamespaceError,
    RopePairing, SequenceId, SessionId,
};
pub use kvd_proto::domain::{
    AnswerForm, AttendBatch, AttendQuery, Attended, BlockKeys, CalibrationOrder, CallError,
    ForkedSequence, LoadPiece, LoadRange, LoadStep, LoadedStep, LseBase, LseOrder, MadeCalibration,
    ModelIdentity, ModelSpec, PartError, QueryError, RegisteredModel, RowLayout, RowTable,
    SampledQueries, SequenceFilter, SequenceFork, StepPart, StoreAck, StoreChunk, StoreStep,
    StoredPart,
};
pub use kvd_proto::v1::{
    BlockChange, BlockEvent, BlockTier, CacheStats, CodecInfo,
    DescribeModelResponse as ModelDescription, DescribeSequenceResponse as SequenceDescription,
    DropBlocksResponse as DroppedBlocks, GetServerInfoResponse as ServerInfo,
    GetStatsResponse as Stats, ListSequencesResponse as SequencePage, ModelStats, NamespaceInfo,
    NamespaceQuota, PinBlocksResponse as PinnedBlocks, PoolStats,
    PublishBlocksResponse as PublishedBlocks, QuotaChange, SequenceInfo, SequencePhase,
    SessionInfo, SetNamespaceQuotasRequest as QuotaOrder,
    SetNamespaceQuotasResponse as ChangedQuotas, StoredBytes, WatchBlocksResponse as WatchedBlocks,
};

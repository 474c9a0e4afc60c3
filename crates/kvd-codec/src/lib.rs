//! The page format and every codec side: the reference encode and decode.
//!
//! A **codec** is a key side, a value side and two windows ([`CodecSpec`]). A **side** is
//! `transforms → quantizer → entropy stage` ([`SideSpec`]). A [`ModelCodec`] binds a spec to a
//! geometry and its [`Calibration`]; it turns blocks of K and V into pages, and a [`PageReader`]
//! turns pages back into rows. Linear transforms are never undone row by row: the key side folds
//! them into the query, the value side out of the accumulator ([`HeadCodec`]).
//!
//! No threads, no I/O, no `unsafe`: this crate is the specification that faster code must match.
#![forbid(unsafe_code)]

mod attention_error;
mod bits;
mod calibration;
mod carried;
mod coding;
mod convert;
mod device_view;
mod drift;
mod encode;
mod error;
mod error_bound;
pub mod fitting;
mod gain;
mod huffman;
mod implied;
mod layer_queries;
mod levels;
mod model;
mod page;
mod parse;
mod payload_sizes;
mod policy;
mod preset;
mod quantizer;
mod random;
mod reader;
mod rotation;
mod row_block;
mod simd;
mod spec;
mod train;
mod transform;
mod vq_spec;

pub use attention_error::ErrorSum;
pub use bits::CodeLayout;
pub use calibration::Calibration;
pub use carried::{AdoptedTable, CarriedTable, LayerPages, verify_checksums};
pub use coding::CodeEncoder;
pub use convert::widen_values;
pub use device_view::{ForwardStep, QueryTransformStep};
pub use encode::takes_too_much;
pub use error::{CalibrationError, CodecError, PageError, SpecError};
pub use error_bound::CheckedBlock;
pub use gain::RowGains;
pub use huffman::HuffmanTable;
pub use huffman::streams::{
    ByteTables, CHUNK_TOKENS, CodeOutlier, NibbleRow, NibbleTables, StreamChunk, StreamCodes,
    StreamRun, StreamTable,
};
pub use implied::ImpliedBits;
pub use kvd_core::PageBytes;
pub use layer_queries::LayerQueries;
pub use levels::level_unit;
pub use model::{BlockRows, EncodedBlock, ModelCodec};
pub use page::{
    FORMAT_VERSION as PAGE_FORMAT_VERSION, HEADER_BYTES, PAGE_ALIGN, Page, PageHeader, page_bytes,
};
pub use payload_sizes::PayloadSizes;
pub use policy::SpecOverride;
pub use preset::{Preset, find_preset, named_preset, presets, resolve_spec};
pub use quantizer::bitalloc::{BitAlloc, BitAllocSpec, OutlierResidual, WidthRun};
pub use quantizer::grid::{Grid, GridSpec};
pub use quantizer::lloyd::LloydSpec;
pub use quantizer::polar_spec::PolarSpec;
pub use quantizer::registry::Quantizer;
pub use quantizer::stored::{StoredLayout, UniformGroups};
pub use quantizer::uniform_spec::{
    GroupAxis, UniformLevels, UniformMode, UniformSpec, UniformStep,
};
pub use quantizer::vq::{Codebook, VectorQuantizer};
pub use quantizer::{HeadCodec, HybridLayout};
pub use reader::{FixedCodes, PageReader, RowSpace};
pub use row_block::LayerSide;
pub use simd::{RegisterWidth, limit_width};
pub use spec::{CodecSpec, EntropyCoding, FloatFormat, SideSpec, Transform};
pub use train::CodeCounts;
pub use vq_spec::{CodebookScope, VqSpec};

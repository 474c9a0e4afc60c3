//! The page format and every codec side: the reference encode and decode.
//!
//! A **codec** is a key side, a value side and two windows ([`CodecSpec`]). A **side** is
//! `transforms → quantizer → entropy stage` ([`SideSpec`]). A [`ModelCodec`] binds a spec to a
//! geometry and its [`Calibration`]; it turns blocks of K and V into pages, and a [`PageReader`]
//! turns pages back into rows. Linear transforms are never undone row by row: the key side folds
//! them into the query, the value side out of the accumulator ([`HeadSide`]).
//!
//! No threads, no I/O, no `unsafe`: this crate is the specification that faster code must match.
#![forbid(unsafe_code)]

mod attention_error;
mod bits;
mod calibration;
mod coding;
mod contract;
mod covariance;
mod drift;
mod encode;
mod error;
mod fit;
mod fit_bitalloc;
mod fit_classes;
mod fit_grid;
mod fit_vq;
mod gain;
mod huffman;
mod implied;
mod kmeans;
mod kmeans_cells;
mod lanes;
mod levels;
mod lloyd;
mod model;
mod outliers;
mod outside;
mod page;
mod parse;
mod policy;
mod preset;
mod queries;
mod reader;
mod rotation;
mod samples;
mod side;
mod spec;
mod train;
mod transform;
mod vq_spec;
mod wide;
mod widen;

pub use attention_error::ErrorSum;
pub use bits::CodeLayout;
pub use calibration::Calibration;
pub use coding::CodeEncoder;
pub use contract::CheckedBlock;
pub use encode::takes_too_much;
pub use error::{CalibrationError, CodecError, PageError, SpecError};
pub use fit::{FitProgress, fit};
pub use gain::Gains;
pub use huffman::HuffmanTable;
pub use implied::ImpliedBits;
pub use lanes::{
    ByteTables, CHUNK_TOKENS, LaneChunk, LaneCodes, LaneRun, LaneTable, NibbleRow, Nibbles, Outlier,
};
pub use levels::level_unit;
pub use model::{BlockRows, EncodedBlock, ModelCodec, PageBytes};
pub use outside::{ForwardStep, TurnStep};
pub use page::{HEADER_BYTES, PAGE_ALIGN, Page, PageHeader, page_bytes};
pub use policy::Override;
pub use preset::{Preset, named_preset, preset, presets, resolve};
pub use queries::LayerQueries;
pub use reader::{FixedCodes, PageReader, Space};
pub use samples::{SampleKind, Samples, SetAside};
pub use side::bitalloc::{BitAlloc, Residual, Run};
pub use side::grid::Grid;
pub use side::stored::Stored;
pub use side::vq::{Codebook, Vq};
pub use side::{HeadSide, HybridLayout, UniformGroups};
pub use spec::{
    CodecSpec, Entropy, FloatFormat, GroupAxis, Quantizer, SideSpec, Transform, UniformMode,
    UniformStep,
};
pub use train::CodeCounts;
pub use vq_spec::{CodebookScope, VqSpec};
pub use wide::{Width, hold};
pub use widen::widen;

//! Fits calibrations: transforms, codebooks, grids and bit allocations, from samples of a model.
//!
//! [`fit_calibration`] makes what a codec needs; [`OpenCodec`] shares its bits among layers, heads
//! and sides. Pages are written and read without this crate. What it takes of the codec is
//! [`kvd_codec::fitting`], and that alone.
//!
//! No threads, no I/O, no `unsafe`. The same samples and seed give the same calibration.
#![forbid(unsafe_code)]

mod bitalloc;
mod calibration;
mod classes;
mod covariance;
mod enough;
mod grid;
mod kmeans;
mod kmeans_cells;
mod lloyd;
mod outliers;
mod polar;
mod quantizer;
mod repeats;
mod row_block;
mod samples;
mod split;
mod vq;

pub use calibration::{FitProgress, fit_calibration};
pub use enough::SampleShortage;
pub use samples::{SampleKind, Samples, SetAside};
pub use split::{GroupCost, HeadGroup, OpenCodec, OpenSide, RatedCodec};

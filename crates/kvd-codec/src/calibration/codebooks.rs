//! The codebooks of one side: who shares which, and their bytes.

use crate::VqSpec;
use crate::quantizer::vq::Codebook;
use half::f16;
use kvd_core::{Geometry, Side};
use std::sync::Arc;

/// `[layers, kv_heads, positions, stages]` codebooks of `[2^b, d]`, row-major, with 1 for an axis
/// along which they are shared. Heads that are bound share the books themselves.
#[derive(Clone, Debug, PartialEq)]
pub struct SideCodebooks {
    shape: [usize; 6],
    books: Vec<Arc<Codebook>>,
}

impl SideCodebooks {
    /// `books` are in the order of `shape`.
    pub fn new(shape: [usize; 6], books: Vec<Arc<Codebook>>) -> Self {
        assert_eq!(books.len(), shape[..4].iter().product::<usize>(), "codebooks of a side");
        Self { shape, books }
    }

    pub(crate) fn shape(&self) -> [usize; 6] {
        self.shape
    }

    /// The books of a head, `[positions, stages]`.
    pub(crate) fn of_head(&self, layer: usize, head: usize) -> &[Arc<Codebook>] {
        let [layers, heads, positions, stages, ..] = self.shape;
        let layer = if layers == 1 { 0 } else { layer };
        let head = if heads == 1 { 0 } else { head };
        let count = positions * stages;
        &self.books[(layer * heads + head) * count..][..count]
    }

    /// Values of all entries.
    pub(super) fn value_count(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let values = self.books.iter().flat_map(|book| book.entries());
        values.flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect()
    }

    /// The shape of a tensor, when some spec asks for it.
    pub(super) fn check_shape(
        shape: &[usize],
        geometry: &Geometry,
        side: Side,
    ) -> Option<[usize; 6]> {
        let shape: [usize; 6] = shape.try_into().ok()?;
        let [layers, heads, positions, stages, entries, dim] = shape;
        let is = |got: usize, all: usize| got == 1 || got == all;
        let fits = is(layers, geometry.layers as usize)
            && is(heads, geometry.kv_heads as usize)
            && (1..=16).contains(&dim)
            && is(positions, geometry.head_dim(side) / dim)
            && (1..=usize::from(VqSpec::STAGES_MAX)).contains(&stages)
            && entries.is_power_of_two()
            && (2..=1 << 16).contains(&entries);
        fits.then_some(shape)
    }

    /// The books in a tensor of that shape; `None` when a value is not finite.
    pub(super) fn from_bytes(shape: [usize; 6], bytes: &[u8]) -> Option<Self> {
        let [.., entries, dim] = shape;
        let value = |bytes: &[u8; 2]| f16::from_le_bytes(*bytes).to_f32();
        let values: Vec<f32> = bytes.as_chunks::<2>().0.iter().map(value).collect();
        if !values.iter().all(|x| x.is_finite()) {
            return None;
        }
        let books = values.chunks_exact(entries * dim);
        let books = books.map(|entries| Arc::new(Codebook::new(dim, entries.to_vec()))).collect();
        Some(Self::new(shape, books))
    }
}

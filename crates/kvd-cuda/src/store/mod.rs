//! Blocks of raw rows as units of the store kernels, and what the pages that they wrote are. Pure:
//! reads no page memory.

mod abi;
mod plan;
mod steps;

pub use abi::{StoreParameters, StoreUnit};
pub use plan::{StoreLaunch, StorePlan, StoredPage};

use crate::side::Kernel;
use crate::{Shapes, SideShape};
use kvd_codec::{CodeLayout, HeadSide, ModelCodec, Quantizer, SideSpec, Stored, page_bytes};
use kvd_core::{DType, LayerIndex, Side};

/// Codes that a sub-vector's own words hold until all are found: `VQ_STAGES_MAX` of `vq.cuh`.
const VQ_STAGES_MAX: u8 = 3;

/// How one head's pages are written.
#[derive(Clone, Debug)]
struct HeadStore {
    kernel: Kernel,
    side: SideShape,
    steps: u64,
    norms: u64,
    limit: f32,
    median: f32,
    /// Whether a step reads whole rows.
    reads_rows: bool,
}

/// How the pages of one layer are written, where kernels do it. Made once per model and layer.
#[derive(Clone, Debug)]
pub struct StoreShapes {
    /// Transforms and norms: goes to the device as it is.
    pub steps: Vec<u8>,
    layer: LayerIndex,
    heads: Vec<[HeadStore; 2]>,
}

/// Why a side is encoded on the host; `None` where a kernel does it.
#[must_use]
pub fn encoded_on_host(side: &SideSpec) -> Option<&'static str> {
    if side.has_trained_tables() {
        return Some("Huffman codes");
    }
    match &side.quantizer {
        Quantizer::Grid { .. } => Some("a grid"),
        Quantizer::BitAlloc { .. } => Some("a bit allocation"),
        Quantizer::Polar { .. } => Some("polar"),
        Quantizer::Vq(vq) if vq.stages > vq.dim.min(VQ_STAGES_MAX) => {
            Some("vq of more stages than channels")
        }
        _ => None,
    }
}

impl StoreShapes {
    /// Of a layer; none when a head has no store kernel: then the host encodes its blocks.
    #[must_use]
    pub fn new(codec: &ModelCodec, layer: LayerIndex, shapes: &Shapes) -> Option<Self> {
        // Rows as they came have no steps: those at the start.
        let mut steps = vec![0; steps::STEP_BYTES];
        let heads = (0..codec.geometry().kv_heads as usize).map(|head| {
            let [keys, values] = Side::BOTH.map(|side| {
                let of_head = codec.head(layer, side, head);
                let (kernel, shape) = shapes.fixed_width(head, side)?;
                HeadStore::new(of_head, kernel, shape, &mut steps)
            });
            Some([keys?, values?])
        });
        let heads = heads.collect::<Option<Vec<_>>>()?;
        steps::align(&mut steps);
        Some(Self { steps, layer, heads })
    }
}

impl HeadStore {
    fn new(side: &HeadSide, kernel: Kernel, shape: SideShape, steps: &mut Vec<u8>) -> Option<Self> {
        if side.lane_runs().is_some() {
            return None;
        }
        let mut norms = 0;
        let limit = match side.stored() {
            Stored::Float(dtype) => dtype.largest(),
            Stored::E4m3 | Stored::Lloyd { .. } => 0.0,
            Stored::Uniform { .. } => side.level_part()?,
            Stored::Codebooks(vq) => {
                if vq.stages() > vq.dim().min(VQ_STAGES_MAX.into()) {
                    return None;
                }
                steps::align(steps);
                norms = steps.len() as u64;
                for set in 0..shape.sets as usize {
                    for stage in 0..vq.stages() {
                        steps::floats(steps, vq.codebook(stage, set).half_norms(), 0);
                    }
                }
                vq.reach()
            }
            _ => return None,
        };
        let reads_rows = side.forward_steps().iter().any(|step| {
            use kvd_codec::ForwardStep::{Matrix, Permute};
            matches!(step, Matrix(_) | Permute { .. })
        });
        Some(Self {
            kernel,
            side: shape,
            steps: steps::push(steps, side),
            norms,
            limit,
            median: side.gain_median().unwrap_or(0.0),
            reads_rows,
        })
    }

    /// Bytes of a page of so many tokens: scales, and all of it, each row with a gain where rows
    /// may have one.
    fn bytes(&self, side: Side, tokens: usize) -> (usize, usize) {
        let (dim, shape) = (self.side.dim as usize, &self.side);
        let codes = |per_row| CodeLayout::new(side, tokens, per_row, shape.bits).size_bytes();
        let rows = tokens.div_ceil(shape.scale_tokens as usize);
        let groups = rows * dim.div_ceil(shape.scale_channels as usize);
        let (scales, codes) = match self.kernel {
            Kernel::F32 => (0, 4 * tokens * dim),
            Kernel::F16 | Kernel::Bf16 => (0, 2 * tokens * dim),
            Kernel::Fp8 => (4, codes(dim)),
            Kernel::Uniform => (4 * groups, codes(dim)),
            Kernel::Symmetric => (2 * groups, codes(dim)),
            Kernel::Hybrid => {
                let share = (shape.scale_tokens as usize).min(tokens);
                let word = (share * shape.scale_channels as usize).div_ceil(8).max(4);
                (groups.div_ceil(8) + groups * (word + 2), codes(dim))
            }
            Kernel::Lloyd => (2 * tokens, codes(dim)),
            _ => (0, codes(dim / shape.book_dim as usize * shape.stages as usize)),
        };
        let gains = if self.median > 0.0 { tokens.div_ceil(2) } else { 0 };
        (scales, page_bytes(scales + codes + gains))
    }
}

/// Number of a dtype for the kernels.
fn dtype_number(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
    }
}

//! Blocks of raw rows as units of the store kernels, and what the pages that they wrote are. Pure:
//! reads no page memory.

mod histogram;
mod plan;
mod sizes;
mod steps;
mod streams;

pub use histogram::{CodeHistogram, HistogramPlan};
pub use plan::{StoreLaunch, StorePlan, StoredPage};

use crate::abi::{SideKernel, VQ_STAGES_MAX};
use crate::kernel_choice::TrainedTables;
use crate::{LayerShapes, SideShape, layer_memory};
use kvd_codec::{HeadCodec, ModelCodec, PayloadSizes, Quantizer, SideSpec, StoredLayout};
use kvd_core::{DType, LayerIndex, Side};
use streams::{StoreConstants, StoreStreams, StreamSizes};

/// The destination of codes: a page of fixed width, a Huffman page, or counters.
#[derive(Clone, Copy, Debug)]
enum CodeOutput {
    Fixed,
    Huffman(StreamSizes),
    /// They are counted, and no page is written.
    Counted(CodeCounters),
}

impl CodeOutput {
    /// Version of the Huffman tables that pages are written with; none where they have none.
    fn table_version(&self) -> Option<u16> {
        match self {
            Self::Huffman(sizes) => sizes.version,
            _ => None,
        }
    }
}

/// Where the codes of a head are counted.
#[derive(Clone, Copy, Debug)]
struct CodeCounters {
    /// Number of the first counter.
    first: usize,
    /// One for each code; none where codes are not counted.
    count: usize,
    /// Copies of each counter in shared memory.
    copies: usize,
}

/// How one head's pages are written.
#[derive(Clone, Debug)]
struct HeadStore {
    kernel: SideKernel,
    side: SideShape,
    steps: u64,
    norms: u64,
    stage: CodeOutput,
    /// Sizes under the prior table, for pages that take too much with the current one.
    prior: Option<StreamSizes>,
    limit: f32,
    median: f32,
    /// Whether a step reads whole rows.
    reads_rows: bool,
    /// Bytes of scales and codes.
    sizes: PayloadSizes,
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
    match &side.quantizer {
        Quantizer::Vq(vq) if usize::from(vq.stages) > usize::from(vq.dim).min(VQ_STAGES_MAX) => {
            Some("vq of more stages than channels")
        }
        _ => None,
    }
}

impl StoreShapes {
    /// The store shapes of a layer; none when a head has no store kernel: then the host encodes its
    /// blocks.
    #[must_use]
    pub fn new(codec: &ModelCodec, layer: LayerIndex, shapes: &LayerShapes) -> Option<Self> {
        // Rows as they came have no steps: those at the start.
        let mut constants = StoreConstants::default();
        constants.bytes.resize(steps::STEP_BYTES, 0);
        let heads = (0..codec.geometry().kv_heads as usize).map(|head| {
            let [keys, values] = Side::BOTH.map(|side| {
                let of_head = codec.head_codec(layer, side, head);
                let versions = codec.trained_tables(layer, side, head);
                let current = codec.current_table(layer, side, head);
                let shape = shapes.current_shape(head, side)?;
                let mut output = |current| {
                    let trained = TrainedTables { versions, current };
                    CodeOutput::for_pages(of_head, side, trained, &mut constants)
                };
                let stage = output(current);
                // A grid's pages, and those that take the prior anyhow, have no other table.
                let prior = if current > 0 { output(0).stream_sizes() } else { None };
                HeadStore::new(of_head, shape, (stage, prior), &mut constants)
            });
            Some([keys?, values?])
        });
        let heads = heads.collect::<Option<Vec<_>>>()?;
        let mut steps = constants.bytes;
        steps::align_sixteen(&mut steps);
        Some(Self { steps, layer, heads })
    }

    /// Bytes of [`StoreShapes::steps`] at most, whichever Huffman tables are built from blocks; 0
    /// where the host encodes.
    pub(crate) fn steps_bytes_max(
        codec: &ModelCodec,
        layer: LayerIndex,
        shapes: &LayerShapes,
    ) -> usize {
        let mut constants = StoreConstants::default();
        constants.bytes.resize(steps::STEP_BYTES, 0);
        let mut built = 0;
        for head in 0..codec.geometry().kv_heads as usize {
            for side in Side::BOTH {
                let of_head = codec.head_codec(layer, side, head);
                let trained = codec.counted_codes(layer, side, head).is_some();
                let (shape, stage) = if trained {
                    // The current table's, and the prior's.
                    built += 2 * streams::run_bytes(of_head.stream_runs().map_or(0, <[_]>::len));
                    (shapes.fixed_width_shape(head, side), CodeOutput::Fixed)
                } else {
                    let none = TrainedTables { versions: &[], current: 0 };
                    let stage = CodeOutput::for_pages(of_head, side, none, &mut constants);
                    (shapes.current_shape(head, side), stage)
                };
                let new = |shape| HeadStore::new(of_head, shape, (stage, None), &mut constants);
                if shape.and_then(new).is_none() {
                    return 0;
                }
            }
        }
        // All heads of a side and variant share the units of its current table, and of its prior.
        let trained = layer_memory::trained_tables(codec, layer).into_iter();
        let units = trained.map(|of| 2 * streams::unit_bytes(of.code_count()));
        steps::align_sixteen(&mut constants.bytes);
        constants.bytes.len() + built + units.sum::<usize>()
    }
}

impl CodeOutput {
    /// The output for pages with that version of the trained tables, or a grid's; appends what it
    /// reads.
    fn for_pages(
        head: &HeadCodec,
        side: Side,
        trained: TrainedTables<'_>,
        constants: &mut StoreConstants,
    ) -> Self {
        let Some(runs) = head.stream_runs() else { return Self::Fixed };
        let grid = head.grid();
        let TrainedTables { versions, current: version } = trained;
        let table = versions.get(version).map_or(&[][..], std::slice::from_ref);
        let (tables, version) = grid.map_or((table, version as u16), |grid| (grid.tables(), 0));
        let lanes = StoreStreams { side, dim: head.dim(), runs, tables, version, grid };
        Self::Huffman(lanes.append_tables(constants))
    }

    /// Sizes of its Huffman codes.
    fn stream_sizes(self) -> Option<StreamSizes> {
        match self {
            Self::Huffman(sizes) => Some(sizes),
            Self::Fixed | Self::Counted(_) => None,
        }
    }
}

impl HeadStore {
    fn new(
        side: &HeadCodec,
        (kernel, shape): (SideKernel, SideShape),
        (stage, prior): (CodeOutput, Option<StreamSizes>),
        constants: &mut StoreConstants,
    ) -> Option<Self> {
        let steps = &mut constants.bytes;
        steps::align_sixteen(steps);
        let norms = steps.len() as u64;
        let limit = Self::append_constants(side, &shape, steps)?;
        let reads_rows = side.forward_steps().iter().any(|step| {
            use kvd_codec::ForwardStep::{Matrix, Permute};
            matches!(step, Matrix(_) | Permute { .. })
        });
        Some(Self {
            kernel,
            side: shape,
            steps: steps::push(steps, side),
            norms,
            stage,
            prior,
            limit,
            median: side.gain_median().unwrap_or(0.0),
            reads_rows,
            sizes: side.payload_sizes(),
        })
    }

    /// Appends what the quantizer reads beside its table; gives its limit. None where it has no
    /// kernel.
    fn append_constants(side: &HeadCodec, shape: &SideShape, steps: &mut Vec<u8>) -> Option<f32> {
        let mut push = |values: &[f32]| steps::append_floats(steps, values, 0);
        Some(match side.stored_layout() {
            StoredLayout::Float(dtype) => dtype.largest_finite(),
            StoredLayout::E4m3 | StoredLayout::Lloyd { .. } => 0.0,
            StoredLayout::Uniform(_) => {
                let levels = side.uniform_levels()?;
                push(&[levels.clip.unwrap_or(0.0)]);
                levels.step_part
            }
            StoredLayout::Codebooks(vq) => {
                if vq.stages() > vq.dim().min(VQ_STAGES_MAX) {
                    return None;
                }
                for set in 0..shape.sets as usize {
                    for stage in 0..vq.stages() {
                        push(vq.stage_codebook(stage, set).half_norms());
                    }
                }
                vq.reach()
            }
            StoredLayout::Polar { .. } => {
                let (halfway, reach) = side.polar_bounds()?;
                push(halfway.as_flattened());
                push(reach);
                0.0
            }
            StoredLayout::BitAlloc(bitalloc) => {
                push(bitalloc.midpoints());
                bitalloc.outlier_bound()
            }
            StoredLayout::Grid(_) => 0.0,
            _ => return None,
        })
    }
}

/// Number of a dtype for the kernels.
pub(crate) fn dtype_number(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
    }
}

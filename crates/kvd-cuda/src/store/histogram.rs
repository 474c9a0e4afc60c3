//! Blocks as launches that count their codes: Huffman tables of a layer are built from them, and
//! their rows do not come to the host (KVComp §3.2).

use super::plan::{PlannedPage, StorePlanBuilder};
use super::{CodeCounters, CodeOutput, HeadStore, StoreConstants, StoreLaunch, steps};
use crate::abi::{STORE_THREADS, SideKernel};
use crate::huffman_tables::SharedMemory;
use crate::kernel_choice::rows_shape;
use crate::{LayerShapes, SideShape};
use kvd_codec::{CodeCounts, LayerSide, ModelCodec, PayloadSizes};
use kvd_compute::EncodeSource;
use kvd_core::{LayerIndex, Side};

/// Shared memory that the counters of a thread block take at most: with it as many thread blocks
/// fit a multiprocessor as registers allow.
const COUNTER_BYTES: usize = 16 << 10;

/// Counters of one side and variant.
#[derive(Clone, Copy, Debug)]
struct OfVariant {
    side: Side,
    variant: usize,
    first: usize,
    count: usize,
}

/// How the codes of one layer are counted, where kernels do it.
#[derive(Clone, Debug)]
pub struct CodeHistogram {
    /// Transforms and norms: goes to the device as it is.
    pub steps: Vec<u8>,
    layer: LayerIndex,
    heads: Vec<[HeadStore; 2]>,
    counters: Vec<OfVariant>,
}

/// Launches that count the codes of some blocks.
#[derive(Clone, Debug, Default)]
pub struct HistogramPlan {
    /// They may run side by side.
    pub launches: Vec<StoreLaunch>,
    /// Bytes of [`super::StoreParameters::pages`], which hold scales, and nobody reads.
    pub page_bytes: u64,
    /// Bytes of [`super::StoreParameters::words`].
    pub words: u64,
}

impl CodeHistogram {
    /// The histogram of a layer; none when a head has no kernel that counts: then the host counts.
    #[must_use]
    pub fn new(codec: &ModelCodec, layer: LayerIndex, shapes: &LayerShapes) -> Option<Self> {
        let mut constants = StoreConstants::default();
        constants.bytes.resize(steps::STEP_BYTES, 0);
        let (mut heads, mut counters) = (Vec::new(), Vec::new());
        for head in 0..codec.geometry().kv_heads as usize {
            let [keys, values] = Side::BOTH.map(|side| {
                let place = LayerSide { layer, side };
                let stage = CodeOutput::Counted(counters_of(codec, place, head, &mut counters));
                if !matches!(stage, CodeOutput::Counted(CodeCounters { count: 1.., .. })) {
                    return Some(looked_at(codec, side, stage));
                }
                let of_head = codec.head_codec(layer, side, head);
                HeadStore::new(
                    of_head,
                    shapes.fixed_width_shape(head, side)?,
                    (stage, None),
                    &mut constants,
                )
            });
            heads.push([keys?, values?]);
        }
        let mut steps = constants.bytes;
        steps::align_sixteen(&mut steps);
        Some(Self { steps, layer, heads, counters })
    }

    /// Counters, of 64 bits each, that are zeros before the first launch. The first counts pages
    /// whose rows hold values that are no numbers.
    #[must_use]
    pub fn len(&self) -> usize {
        1 + self.counters.iter().map(|of| of.count).sum::<usize>()
    }

    /// Whether nothing is counted but pages whose rows hold values that are no numbers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.counters.is_empty()
    }

    /// The launches for whole blocks.
    #[must_use]
    pub fn plan_launches(
        &self,
        codec: &ModelCodec,
        blocks: &[EncodeSource],
        shared: SharedMemory,
    ) -> HistogramPlan {
        let mut builder = StorePlanBuilder::new(codec, self.layer, shared);
        for block in blocks {
            for side in Side::BOTH {
                for (head, of_head) in self.heads.iter().enumerate() {
                    let page = PlannedPage { block, index: 0, side, head };
                    builder.push_page(page, &of_head[side.index()]);
                }
            }
        }
        let plan = builder.into_plan();
        HistogramPlan { launches: plan.launches, page_bytes: plan.page_bytes, words: plan.words }
    }

    /// Code counts from the counters; none where some row held a value that is no number, so that
    /// its block must be left out.
    #[must_use]
    pub fn read_counts(&self, counters: &[u64]) -> Option<Vec<CodeCounts>> {
        let counts = |of: &OfVariant| CodeCounts {
            side: of.side,
            variant: of.variant,
            counts: counters[of.first..][..of.count].to_vec(),
        };
        (counters.first() == Some(&0)).then(|| self.counters.iter().map(counts).collect())
    }
}

/// The counters of a head, appended where its side and variant are new.
fn counters_of(
    codec: &ModelCodec,
    place: LayerSide,
    head: usize,
    known: &mut Vec<OfVariant>,
) -> CodeCounters {
    let LayerSide { layer, side } = place;
    let Some((variant, count)) = codec.counted_codes(layer, side, head) else {
        return CodeCounters { first: 0, count: 0, copies: 0 };
    };
    let same = known.iter().find(|of| (of.side, of.variant) == (side, variant));
    let first = same.map(|of| of.first).unwrap_or_else(|| {
        let first = known.last().map_or(1, |of| of.first + of.count);
        known.push(OfVariant { side, variant, first, count });
        first
    });
    let mut copies = STORE_THREADS as usize;
    while copies > 1 && 4 * count * copies > COUNTER_BYTES {
        copies /= 2;
    }
    CodeCounters { first, count, copies }
}

/// A side whose codes are not counted: its rows are looked at as they came.
fn looked_at(codec: &ModelCodec, side: Side, stage: CodeOutput) -> HeadStore {
    let geometry = codec.geometry();
    let (dtype, dim) = (geometry.dtype, geometry.head_dim(side));
    let shape: SideShape = rows_shape(dtype, dim);
    HeadStore {
        kernel: SideKernel::of_rows(dtype),
        side: shape,
        steps: 0,
        norms: 0,
        stage,
        prior: None,
        limit: 0.0,
        median: 0.0,
        reads_rows: false,
        sizes: PayloadSizes::of_rows(dtype, dim),
    }
}

//! Which plans are small: one thread answers them in about the time that it takes to wake others.
//! Estimated from a plan and the codecs of its layer alone; no page is read for it.

use super::CpuBackend;
use super::kernel_table::KernelTarget;
use super::simd::{InstructionSet, Simd};
use super::unit_plan::UNIT_QUERY_TOKENS;
use crate::{AttendPlan, PlanQuery, Source};
use kvd_codec::{HeadCodec, StoredLayout};
use kvd_core::Side;
use std::sync::LazyLock;

/// Estimated time up to which a plan is small, about that of 256 tokens by 32 heads of raw rows or
/// four-bit pages. The numbers below are of one thread of a Sapphire Rapids, rounded up.
const SMALL_PICOS: u64 = 200_000_000;

/// A unit of a KV head before its first token: queries folded, answers unfolded. For each side of
/// entropy-coded or bit-allocated pages, whose tables are set up, [`CODED_SIDE_PICOS`] beside.
const UNIT_PICOS: u64 = 5_000_000;
const CODED_SIDE_PICOS: u64 = 5_000_000;
/// A part of a unit: its page opened, its header read.
const PART_PICOS: u64 = 150_000;
/// One channel of one side of a row, by how it is read: raw, by a kernel that multiplies codes, by
/// one that takes entropy-coded or bit-allocated pages, decoded to f32.
const RAW_PICOS: u64 = 200;
const FUSED_PICOS: u64 = 120;
const CODED_PICOS: u64 = 400;
const DECODED_PICOS: u64 = 3000;
/// One channel of one side of a row, for one query row.
const SCORE_PICOS: u64 = 15;
/// How much longer rows take with narrow vector registers, and without any.
const NARROW_FACTOR: u64 = 2;
const PORTABLE_FACTOR: u64 = 12;

/// The best instruction set of this machine.
static WIDEST: LazyLock<Simd> = LazyLock::new(Simd::detect_widest);

/// Times of a side of a layer, in picoseconds.
#[derive(Clone, Copy)]
struct SidePicos {
    unit: u64,
    raw_row: u64,
    page_row: u64,
    score: u64,
}

impl SidePicos {
    fn new(head: &HeadCodec, side: Side, target: KernelTarget) -> Self {
        let is_coded = head.stream_runs().is_some() || head.bitalloc().is_some();
        let factor = match target.vector_set() {
            InstructionSet::Avx512 => 1,
            InstructionSet::Portable => PORTABLE_FACTOR,
            _ => NARROW_FACTOR,
        };
        let (unit, page_channel) = match target.has_kernel(head, side) {
            _ if matches!(head.stored_layout(), StoredLayout::Float(_)) => (0, RAW_PICOS * factor),
            // Decoding is in no vector registers anywhere.
            false => (0, DECODED_PICOS),
            true if is_coded => (CODED_SIDE_PICOS, CODED_PICOS * factor),
            true => (0, FUSED_PICOS * factor),
        };
        let dim = head.dim() as u64;
        let [raw_row, page_row, score] =
            [RAW_PICOS * factor, page_channel, SCORE_PICOS * factor].map(|channel| channel * dim);
        Self { unit, raw_row, page_row, score }
    }
}

/// Times of one KV head of a layer, both sides.
struct HeadPicos {
    sides: [SidePicos; 2],
    /// Query heads.
    group: u64,
}

impl HeadPicos {
    fn sum(&self, of: impl Fn(&SidePicos) -> u64) -> u64 {
        self.sides.iter().map(of).sum()
    }

    /// A query's time for one KV head, or more than `most`.
    fn query_picos(&self, query: &PlanQuery, most: u64) -> u64 {
        // Each unit of so many query tokens reads all parts.
        let units = u64::from(query.n_q.div_ceil(UNIT_QUERY_TOKENS));
        let rows = u64::from(query.n_q).saturating_mul(self.group);
        let scored = self.sum(|side| side.score).saturating_mul(rows);
        let read = |of: fn(&SidePicos) -> u64| self.sum(of).saturating_mul(units);
        let [raw, page] = [read(|side| side.raw_row), read(|side| side.page_row)];
        let mut picos = units.saturating_mul(UNIT_PICOS + self.sum(|side| side.unit));
        for part in query.parts.iter() {
            let read = if matches!(part.source, Source::Raw { .. }) { raw } else { page };
            let of_part = u64::from(part.rows).saturating_mul(read.saturating_add(scored));
            picos = picos.saturating_add(of_part).saturating_add(PART_PICOS);
            if picos > most {
                break;
            }
        }
        picos
    }
}

impl CpuBackend {
    /// Whether one thread answers a plan about as soon as others wake for it. Only the backend's
    /// threads know of a limit of the instruction set, so that none is small under one.
    pub(super) fn is_small(&self, plan: &AttendPlan) -> bool {
        if self.simd != *WIDEST {
            return false;
        }
        let Ok(codec) = self.codec(plan.model) else { return false };
        let geometry = codec.geometry();
        let kv_heads = u64::from(geometry.kv_heads).max(1);
        let group = u64::from(plan.q_heads) / kv_heads;
        let target = KernelTarget::new(self.config(), group as usize);
        // Heads of a layer are of one kind.
        let side = |side| SidePicos::new(codec.head_codec(plan.layer, side, 0), side, target);
        let head = HeadPicos { sides: Side::BOTH.map(side), group };
        let mut picos = 0u64;
        for query in &plan.queries {
            let of_head = head.query_picos(query, SMALL_PICOS);
            picos = picos.saturating_add(of_head.saturating_mul(kv_heads));
            if picos > SMALL_PICOS {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuOptions, Precision, RegisteredModel};
    use crate::{PlanPart, Sampling};
    use bytes::Bytes;
    use kvd_codec::ModelCodec;
    use kvd_core::{DType, Extent, Geometry, LayerIndex, ModelId, RopePairing};

    const PAGE_TOKENS: u32 = 64;

    /// A plan over so many tokens of pages, and whether a backend takes it for small.
    #[derive(Clone, Copy)]
    struct Asked {
        codec: &'static str,
        kv_heads: u32,
        q_heads: u32,
        n_q: u32,
        tokens: u32,
    }

    impl Asked {
        fn is_small(self) -> bool {
            self.is_small_for(|_| {})
        }

        fn is_small_for(self, change: impl FnOnce(&mut CpuBackend)) -> bool {
            let Self { codec, kv_heads, q_heads, n_q, tokens } = self;
            let geometry = Geometry {
                layers: 1,
                kv_heads,
                head_dim_k: 128,
                head_dim_v: 128,
                block_tokens: PAGE_TOKENS,
                dtype: DType::F16,
                rope_pairing: RopePairing::Half,
            };
            let spec = kvd_codec::resolve_spec(codec).unwrap();
            let codec = ModelCodec::new(geometry, spec, None).unwrap();
            let options = CpuOptions { arena_bytes: 1 << 16, prefault: false, threads: 1 };
            let mut backend = CpuBackend::new(options).unwrap();
            let model = RegisteredModel { codec, sampling: Sampling::default() };
            backend.models.insert(ModelId(1), model);
            change(&mut backend);
            let extent = Extent { offset: 0, len: 0 };
            let part = |first_token: u32| PlanPart {
                first_token,
                rows: PAGE_TOKENS.min(tokens - first_token),
                source: Source::Pages { extent, ends: [].into(), first_row: 0 },
            };
            let parts = (0..tokens).step_by(PAGE_TOKENS as usize).map(part).collect();
            let position = tokens.saturating_sub(n_q);
            backend.is_small(&AttendPlan {
                model: ModelId(1),
                layer: LayerIndex(0),
                q_heads,
                dtype: DType::F16,
                scale: None,
                soft_cap: None,
                queries: vec![PlanQuery { n_q, position, sliding_window: None, parts }],
                q: Bytes::new(),
            })
        }
    }

    #[test]
    fn few_tokens_of_many_heads_are_small_and_many_of_one_are_not() {
        let wide = Asked { codec: "kivi-4", kv_heads: 8, q_heads: 32, n_q: 1, tokens: 1 };
        assert!(wide.is_small());
        let long = Asked { codec: "kivi-4", kv_heads: 1, q_heads: 1, n_q: 1, tokens: 8192 };
        assert!(!long.is_small(), "8192 scores, and 8192 tokens to read");
        let tokens_of = |codec, precision| {
            let is_small = |tokens: &u32| {
                let asked = Asked { codec, tokens: *tokens, ..long };
                asked.is_small_for(|backend| backend.set_precision(precision))
            };
            (1..8192).step_by(16).take_while(is_small).last().unwrap()
        };
        // By what each costs to read; without rounding, four-bit pages are decoded.
        let fused = tokens_of("kivi-4", Precision::Fast);
        let coded = tokens_of("kvcomp", Precision::Fast);
        let decoded = tokens_of("kivi-4", Precision::Single);
        assert!(fused > 2 * coded && coded > 2 * decoded, "{fused}, {coded}, {decoded}");
    }

    #[test]
    fn every_unit_of_query_tokens_reads_its_pages() {
        let asked = Asked { codec: "kivi-4", kv_heads: 1, q_heads: 1, n_q: 32, tokens: 1024 };
        let more = Asked { n_q: 320, ..asked };
        assert_eq!((asked.is_small(), more.is_small()), (true, false));
    }

    #[test]
    fn nothing_is_small_where_instructions_are_limited_and_little_without_vectors() {
        let asked = Asked { codec: "kivi-4", kv_heads: 1, q_heads: 1, n_q: 1, tokens: 1 };
        let limit = |backend: &mut CpuBackend| backend.limit(InstructionSet::Portable).unwrap();
        let is_widest = *WIDEST == Simd::named(Some(InstructionSet::Portable)).unwrap();
        assert_eq!(asked.is_small_for(limit), is_widest);
    }
}

//! Lane instructions that a stored value takes: counted in the kernels' SASS for sm_90, four query
//! rows, full tiles (docs/perf/gpu-plan.md says how). Not measured.

use super::parts;
use super::pipes::PipeCounts;
use kvd_codec::{
    CodebookScope, EntropyCoding, FloatFormat, Quantizer, SideSpec, UniformMode, VqSpec,
};
use kvd_core::Side;

/// Counted instructions of a codec's kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InstructionCounts {
    /// Lane instructions per stored value.
    pub per_value: f64,
    /// Those of them that a pipe takes at less than 128 lanes a clock.
    pub pipes: PipeCounts,
    /// Whether that is all of them. Of most kernels for any shape, and of other numbers of query
    /// rows than four, only what the one with a preset's shape as constants takes was counted, what
    /// its look-ups take more, and what scales of values do.
    pub is_all: bool,
}

impl InstructionCounts {
    /// Slots of the schedulers that a value takes, and the pipe that takes that long; none where
    /// instructions are issued as fast as schedulers can.
    pub(super) fn scheduler_slots(&self, compute: [u32; 2]) -> (f64, Option<&'static str>) {
        match self.pipes.longest_pipe(compute) {
            (slots, pipe) if slots > self.per_value => (slots, Some(pipe)),
            _ => (self.per_value, None),
        }
    }
}

/// Query rows of the kernels that were counted.
pub(super) const ROWS: u32 = 4;

/// A kernel as it is launched.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaunchedKernel {
    /// Whether products of both sides are on tensor cores.
    pub(super) on_tensor_cores: bool,
    /// Whether it has the codec's shape as constants.
    pub(super) is_fixed: bool,
    /// Whether it is compiled when a model is registered.
    pub(super) is_late: bool,
    /// Query rows: 1, 4 or 8.
    pub(super) rows: u32,
    /// The GPU's compute capability.
    pub(super) compute: [u32; 2],
}

/// So many instructions of a value, and by pipes: integers, products of integers, floats, counts of
/// bits, loads.
#[derive(Clone, Copy)]
pub(super) struct InstructionMix(f64, PipeCounts);

const fn instruction_mix(per_value: f64, pipes: [f64; 5]) -> InstructionMix {
    InstructionMix(per_value, PipeCounts::new(pipes))
}

impl InstructionMix {
    fn plus(self, other: Self) -> Self {
        Self(self.0 + other.0, self.1.plus(other.1))
    }

    pub(super) fn per_value(self) -> f64 {
        self.0
    }

    pub(super) fn times(self, by: f64) -> Self {
        Self(self.0 * by, self.1.times(by))
    }

    /// With so many more, of the same kinds.
    fn and_more(self, more: f64) -> Self {
        Self(self.0 + more, self.1.times((self.0 + more) / self.0))
    }

    pub(super) fn into_counts(self, is_all: bool) -> InstructionCounts {
        InstructionCounts { per_value: self.0, pipes: self.1, is_all }
    }
}

/// Counts both sides; none where no kernel like the pair's was counted. `whole`: whether all
/// entries of a side's codebooks stand in shared memory.
pub(super) fn count_pair(
    specs: [&SideSpec; 2],
    kernel: LaunchedKernel,
    whole: [bool; 2],
) -> Option<InstructionCounts> {
    let is_counted = kernel.rows == ROWS;
    if !kernel.on_tensor_cores {
        // Of the others products are the smallest part: codes are unpacked one by one.
        return of_floats(specs).filter(|_| is_counted);
    }
    if kernel.is_late {
        // Pipes as of rows, whose integers bind nowhere: what binds of a mixture was not counted.
        let decodes = specs.iter().any(|spec| spec.entropy == EntropyCoding::Huffman);
        return parts::count_parts(specs, kernel.rows, RAW).filter(|_| !decodes);
    }
    if specs.iter().any(|spec| spec.entropy == EntropyCoding::Huffman) {
        let codes = Side::BOTH.map(|side| huffman_mix(specs[side.index()], side));
        let of_both = codes[0]?.plus(codes[1]?).times(0.5);
        return Some(decode_mix(specs)?.plus(of_both).into_counts(is_counted));
    }
    let of_kernel = of_kernel(specs, kernel.compute)?;
    if kernel.is_fixed {
        return Some(of_kernel.into_counts(!is_converted(specs, kernel.compute)));
    }
    let is_whole = is_counted && !is_converted(specs, kernel.compute);
    Some(match (&specs[0].quantizer, &specs[1].quantizer) {
        (Quantizer::Float(_), _) => of_kernel.into_counts(is_whole),
        (keys @ Quantizer::Uniform { mode: UniformMode::Asym, .. }, Quantizer::Uniform { .. }) => {
            let is_plain = [2, 4].map(|bits| Some(1 << bits)).contains(&keys.code_count());
            any_uniform(kernel.rows).into_counts(is_plain)
        }
        (_, Quantizer::Uniform { mode: UniformMode::Asym, .. }) => {
            of_kernel.and_more(SCALED_VALUES).into_counts(false)
        }
        _ => of_kernel.and_more(looked_up(specs, whole).unwrap_or(0.0)).into_counts(false),
    })
}

/// Counts of the kernel for any shape of uniform levels of two or four bits, keys with a scale by
/// channel and values with one by token.
fn any_uniform(rows: u32) -> InstructionMix {
    match rows {
        1 => instruction_mix(6.6, [3.10, 1.01, 0.29, 0.01, 0.82]),
        ROWS => instruction_mix(10.0, [4.48, 1.54, 0.88, 0.05, 1.27]),
        _ => instruction_mix(15.1, [6.08, 2.32, 1.67, 0.11, 2.18]),
    }
}

/// Extra instructions for values with scales of any shape, compared with constant shapes: of
/// `kivi-4` 405 and 149 instructions of two tiles, not 191 and 72.
const SCALED_VALUES: f64 = (405.0 + 149.0 - 191.0 - 72.0) / 128.0;

/// Counts of a whole kernel, by `cargo xtask count` (gpu-plan.md, "Attention, counted").
fn of_kernel(specs: [&SideSpec; 2], compute: [u32; 2]) -> Option<InstructionMix> {
    use Quantizer as Q;
    Some(match (&specs[0].quantizer, &specs[1].quantizer) {
        (Q::Float(FloatFormat::F32), _) | (_, Q::Float(FloatFormat::F32)) => return None,
        (Q::Float(FloatFormat::E4M3), _) if is_converted(specs, compute) => {
            instruction_mix(12.6, [7.35, 0.83, 1.14, 0.03, 1.08])
        }
        (Q::Float(FloatFormat::E4M3), _) => instruction_mix(7.5, [2.94, 0.80, 0.98, 0.03, 1.19]),
        // As f16's, with what bf16 takes more.
        (Q::Float(FloatFormat::BF16), _) => RAW.and_more(1.1),
        (Q::Float(_), _) => RAW,
        (Q::Uniform { mode: UniformMode::Hybrid, .. }, _) => {
            instruction_mix(7.5, [3.48, 1.03, 1.09, 0.02, 1.00])
        }
        // Where keys have a scale per channel, queries are cut for every tile.
        (Q::Uniform { .. }, Q::Uniform { .. }) => {
            instruction_mix(6.1, [2.67, 0.67, 0.85, 0.02, 1.11])
        }
        (Q::Polar { .. }, Q::Uniform { .. }) => {
            instruction_mix(6.9, [2.73, 1.01, 0.49, 0.02, 1.39])
        }
        (Q::Lloyd { .. }, Q::Uniform { .. }) => {
            instruction_mix(6.9, [3.79, 0.86, 0.32, 0.02, 0.95])
        }
        (Q::Vq(vq), Q::Vq(_)) => match (vq.dim, vq.bits) {
            (2, 8) => instruction_mix(6.0, [2.85, 0.95, 0.20, 0.02, 1.16]),
            (2, 4) => instruction_mix(4.5, [2.44, 0.58, 0.20, 0.02, 0.61]),
            _ => instruction_mix(4.5, [1.93, 0.67, 0.20, 0.02, 0.79]),
        },
        // Of groups of 1 to 4 bits, mostly 2.
        (Q::BitAlloc { .. }, Q::BitAlloc { .. }) => {
            instruction_mix(7.0, [3.15, 1.27, 0.18, 0.02, 0.90])
        }
        _ => return None,
    })
}

/// Whether fp8 codes are made f16 by logic, where no instruction does it. Of that kernel the path
/// that was counted has 14 of 16 products.
fn is_converted([keys, _]: [&SideSpec; 2], compute: [u32; 2]) -> bool {
    matches!(keys.quantizer, Quantizer::Float(FloatFormat::E4M3)) && compute < [8, 9]
}

/// Counts for f16 rows.
const RAW: InstructionMix = instruction_mix(6.7, [2.33, 0.95, 0.84, 0.05, 0.95]);

/// Counts for codebooks of floats of both sides, one set for a head, `vqfloat_vqfloat` whole.
fn of_floats(specs: [&SideSpec; 2]) -> Option<InstructionCounts> {
    let of_side = |spec: &SideSpec| match &spec.quantizer {
        Quantizer::Vq(vq) if vq.scope != CodebookScope::Group => match (vq.dim, vq.stages) {
            (4, 1) => Some((instruction_mix(36.5, [10.84, 6.56, 5.36, 0.50, 6.97]), vq.bits == 12)),
            (8, 1) => Some((instruction_mix(26.1, [7.27, 3.70, 5.28, 0.30, 5.49]), vq.bits == 12)),
            (4, 2) => {
                Some((instruction_mix(66.7, [18.68, 12.35, 10.42, 0.91, 13.06]), vq.bits == 8))
            }
            _ => None,
        },
        _ => None,
    };
    let [keys, values] = [of_side(specs[0])?, of_side(specs[1])?];
    Some(keys.0.plus(values.0).times(0.5).into_counts(keys.1 && values.1))
}

/// Extra instructions of a pair's codebooks compared with those of `vecinfer-2`, half for each
/// side: entries that are not in shared memory, codes of two planes.
fn looked_up(specs: [&SideSpec; 2], whole: [bool; 2]) -> Option<f64> {
    let of = |side: Side| match &specs[side.index()].quantizer {
        Quantizer::Vq(vq) => Some(of_look_up(vq, side, whole[side.index()])),
        _ => None,
    };
    let of_vecinfer = 2.1 + 3.2;
    Some(((of(Side::Key)? + of(Side::Value)? - of_vecinfer) / 2.0).max(0.0))
}

/// Counts for a code of one channel.
fn of_look_up(vq: &VqSpec, side: Side, whole: bool) -> f64 {
    let of_all_or_some = match (side, vq.dim, vq.bits) {
        (Side::Key, 2, 8) => [3.6; 2],
        (Side::Key, _, 12) => [2.9, 4.9],
        (Side::Key, ..) => [2.1; 2],
        (Side::Value, 2, 8) => [5.5, 9.7],
        (Side::Value, _, 12) => [7.5, 9.6],
        (Side::Value, ..) => [3.2, 5.3],
    };
    of_all_or_some[usize::from(!whole)]
}

/// Counts for tiles of Huffman codes, two together, decoding apart.
fn decode_mix(specs: [&SideSpec; 2]) -> Option<InstructionMix> {
    match (&specs[0].quantizer, &specs[1].quantizer) {
        (Quantizer::Grid { .. }, Quantizer::Grid { .. }) => {
            Some(instruction_mix(8.4, [3.27, 2.14, 0.26, 0.03, 1.06]))
        }
        (Quantizer::Uniform { .. }, Quantizer::Uniform { .. }) => {
            Some(instruction_mix(13.7, [6.32, 2.34, 0.77, 0.12, 1.85]))
        }
        _ => None,
    }
}

/// To decode a code: a step of four takes so many look-ups and top-ups, as presets' tables have
/// them on rows of noise.
fn huffman_mix(spec: &SideSpec, side: Side) -> Option<InstructionMix> {
    // Codes of a look-up and of a top-up, and the part of them whose low bits follow the symbol.
    let steps = match (&spec.quantizer, side) {
        // Of kvd-4 to kvd-1.5, whichever is nearest.
        (Quantizer::Grid { rate }, Side::Key) => match rate {
            rate if *rate > 3.7 => (1.39, 1.39, 0.62),
            rate if *rate > 2.8 => (1.00, 1.00, 1.00),
            rate if *rate > 2.1 => (1.05, 1.82, 0.15),
            _ => (1.48, 2.96, 0.0),
        },
        (Quantizer::Grid { rate }, Side::Value) if *rate > 2.9 => (1.0, 2.0, 0.0),
        (Quantizer::Grid { .. }, Side::Value) => (2.0, 4.0, 0.0),
        // Up to five levels, or more.
        (Quantizer::Uniform { .. }, _) => match spec.quantizer.code_count()? {
            0..=5 => (2.0, 4.0, 0.0),
            6..=32 => (1.0, 2.0, 0.0),
            _ => return None,
        },
        _ => return None,
    };
    Some(step_mix(steps).times(0.25))
}

/// A fit to the counted steps of four codes, within two instructions, or four of the longest, and
/// their integers within one. A look-up is one load, a top-up one more and two counts of bits.
fn step_mix((per_entry, per_word, with_low_bits): (f64, f64, f64)) -> InstructionMix {
    let (entries, words, low) = (4.0 / per_entry, 4.0 / per_word, 4.0 * with_low_bits);
    let all = 4.0 + 4.4 * entries + 12.5 * words + 3.0 * low;
    let integer = 2.6 + 2.2 * entries + 6.3 * words + 3.0 * low;
    let multiply = 0.8 * entries + 3.6 * words;
    instruction_mix(all, [integer, multiply, 0.0, 2.0 * words, 1.0 + entries + words])
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_codec::resolve_spec;

    const FIXED: LaunchedKernel = LaunchedKernel {
        on_tensor_cores: true,
        is_fixed: true,
        is_late: false,
        rows: ROWS,
        compute: [9, 0],
    };
    const ANY: LaunchedKernel = LaunchedKernel { is_fixed: false, ..FIXED };

    fn of(codec: &str, kernel: LaunchedKernel) -> Option<InstructionCounts> {
        let codec = resolve_spec(codec).unwrap();
        count_pair(Side::BOTH.map(|side| codec.side(side)), kernel, [true; 2])
    }

    #[test]
    fn pairs_compiled_late_take_the_parts_of_their_sides() {
        let late = LaunchedKernel { is_late: true, ..ANY };
        let of_late = |codec| of(codec, late).unwrap().per_value;
        // 4.5 and 10.0 alone.
        let mixed = of_late("k=vq(d=4,b=8); v=uniform(b=2,g=32,axis=token)");
        assert!((mixed - 7.35).abs() < 0.05, "{mixed}");
        // Its own, as if both sides were: as the kernel for any shape, and rows one tile at a time.
        assert!((of_late("kivi-2") - any_uniform(ROWS).0).abs() < 0.2);
        assert!(of_late("raw") >= of("raw", FIXED).unwrap().per_value - 0.2);
        assert_eq!(of("k=vq(d=4,b=8); v=f16", LaunchedKernel { rows: 8, ..late }), None);
        assert_eq!(of("k=f16; v=grid(rate=2)/huffman", late), None);
    }

    #[test]
    fn every_preset_on_tensor_cores_is_counted() {
        for preset in kvd_codec::presets().iter().filter(|p| p.name != "vq-residual-4") {
            let counted = of(preset.name, FIXED).unwrap();
            assert!(counted.per_value > 4.0 && counted.is_all, "{}: {counted:?}", preset.name);
            let any = of(preset.name, ANY).unwrap();
            assert!(any.per_value >= counted.per_value, "{}: {any:?}", preset.name);
        }
        assert!(!of("polar-4+2", ANY).unwrap().is_all);
        assert_eq!(of("k=vq(d=2,b=4); v=uniform(b=4,axis=token)", ANY), None);
    }

    #[test]
    fn kernels_on_cuda_cores_that_were_not_counted_say_nothing() {
        let of_rows = |codec, rows| {
            let counted = of(codec, LaunchedKernel { on_tensor_cores: false, rows, ..ANY })?;
            Some((counted.per_value, counted.is_all))
        };
        for codec in ["raw", "k=vq(d=4,b=8,stages=2,scope=group); v=vq(d=4,b=12)"] {
            assert_eq!([4, 8].map(|rows| of_rows(codec, rows)), [None; 2], "{codec}");
        }
        let floats = ["vecinfer-3", "vecinfer-1.5", "vecinfer-1.25", "vq-residual-4"];
        let counted = [(36.5, true), (26.1, true), (26.1, false), (66.7, true)];
        assert_eq!(floats.map(|codec| of_rows(codec, 4)), counted.map(Some));
        assert_eq!(of_rows("vecinfer-3", 1), None);
    }

    #[test]
    fn kernels_for_any_shape_and_other_rows_take_what_they_were_counted_to() {
        let of_rows = |codec, rows| of(codec, LaunchedKernel { rows, ..ANY }).unwrap();
        for preset in ["kivi-4", "kivi-2"] {
            let all = [1, 4, 8].map(|rows| of_rows(preset, rows));
            assert_eq!(all.map(|counted| counted.per_value), [6.6, 10.0, 15.1], "{preset}");
            assert!(all.iter().all(|counted| counted.is_all), "{preset}");
        }
        let fixed = of("kivi-4", FIXED).unwrap();
        assert!(fixed.per_value < 0.7 * of_rows("kivi-4", 4).per_value, "{fixed:?}");
        // Of these what rows do was not counted.
        for preset in ["raw", "kvd-2", "vecinfer-2"] {
            assert!(!of_rows(preset, 8).is_all, "{preset}");
        }
        assert!(of_rows("raw", 4).is_all && of_rows("kvd-2", 4).is_all);
    }

    #[test]
    fn steps_of_huffman_codes_are_those_that_were_counted() {
        // Codes per entry and per top-up, whether low bits follow, instructions of a step of four
        // keys and of one of values: docs/perf/gpu-plan.md.
        for (per_entry, per_word, low, counted) in [
            (4.0, 4.0, 0.0, [22.5, 21.8]),
            (2.0, 4.0, 0.0, [25.2, 24.8]),
            (2.0, 2.0, 0.0, [38.2, 37.8]),
            (1.0, 4.0, 0.0, [34.2, 33.8]),
            (1.0, 2.0, 0.0, [46.2, 45.8]),
            (1.0, 4.0, 1.0, [46.2, 45.8]),
            (1.0, 2.0, 1.0, [58.2, 57.8]),
            (1.0, 1.0, 1.0, [85.8, 87.5]),
        ] {
            let InstructionMix(step, pipes) = step_mix((per_entry, per_word, low));
            assert!((pipes.integer / step - 0.55).abs() < 0.1, "{step}: {pipes:?}");
            let off = counted.map(|counted| (step - counted).abs());
            let most = if per_word < 2.0 { 4.0 } else { 1.7 };
            assert!(off.iter().all(|off| *off < most), "{step} and not {counted:?}");
        }
        let of = |codec: &str| {
            let codec = resolve_spec(codec).unwrap();
            Side::BOTH.map(|side| huffman_mix(codec.side(side), side).unwrap().0)
        };
        assert!(of("kvcomp").iter().all(|code| (code - 46.0 / 4.0).abs() < 0.2));
        assert!((of("kvcomp-channel")[0] - 25.0 / 4.0).abs() < 0.2);
        // Keys one by one, of values two to an entry and four to a top-up.
        assert!((of("kvd-3")[1] - 25.0 / 4.0).abs() < 0.2 && of("kvd-3")[0] > 20.0);
    }

    #[test]
    fn integers_bind_where_half_of_the_instructions_are_such() {
        let slots = |codec: &str| of(codec, FIXED).unwrap().scheduler_slots([9, 0]);
        for codec in ["raw", "kivi-4", "kivi-2", "vecinfer-2", "kvd-2-fast", "kvd-2", "kvcomp"] {
            assert_eq!(slots(codec), (of(codec, FIXED).unwrap().per_value, None), "{codec}");
        }
        let (of_registers, pipe) = slots("vecinfer-2-reg");
        assert!((of_registers - 4.9).abs() < 0.1 && pipe == Some("integers"), "{of_registers}");
        assert_eq!(slots("turbo-4").1, Some("integers"));
    }

    #[test]
    fn fp8_codes_take_more_without_their_instruction() {
        let of = |compute| of("fp8", LaunchedKernel { compute, ..ANY }).unwrap();
        let [a100, ada, hopper] = [[8, 0], [8, 9], [9, 0]].map(of);
        assert_eq!((ada, hopper.per_value, hopper.is_all), (hopper, 7.5, true));
        assert!(a100.per_value == 12.6 && !a100.is_all, "{a100:?}");
        assert!(a100.scheduler_slots([8, 0]).0 > 14.0);
    }

    #[test]
    fn what_is_not_whole_takes_more() {
        let codec = resolve_spec("vecinfer-1.5").unwrap();
        let sides = Side::BOTH.map(|side| codec.side(side));
        let of = |whole| count_pair(sides, ANY, whole).unwrap();
        let more = of([false; 2]).per_value - of([true; 2]).per_value;
        // Two instructions of a key's channel, 2.1 of a value's.
        assert!((more - 2.05).abs() < 1e-9, "{more}");
    }
}

//! Codes as `kernels/include/kvd/unpack.cuh` makes bytes of them. Of bit allocations: the runs of
//! a row, who spreads them, their levels as bytes, and what each byte of a row is worth; the same
//! of runs in whole groups, which `bit_groups.cuh` does not spread.

use crate::abi::{SideShape, TILE_TOKENS};
use crate::kernel_choice::{COPY_BYTES, RUNS_MAX};
use kvd_codec::level_unit;
use kvd_core::Side;

/// Items of a warp's job, two for every code of a token: `SPREAD_JOB`.
const JOB_ITEMS: usize = 64;
/// Widths whose levels registers hold: `SPREAD_BITS_REGISTERS`.
const REGISTER_BITS: usize = 4;
const REGISTER_CODES: usize = 1 << REGISTER_BITS;
/// Neighbours in a word.
const QUAD: usize = 4;
/// Words of the table's head, and of a run.
const HEAD_WORDS: usize = 4;
const RUN_WORDS: usize = 8;
/// Words of values that begin at so many have four lanes at different banks.
const ROW_STEP: usize = 16;
/// Places of values that a product of all warps takes.
const BLOCK_PLACES: usize = 32;
/// Rows of fours of tokens in a tile.
const TOKEN_QUADS: usize = TILE_TOKENS / QUAD;
/// Coefficients of a group, warps that have some of values each, and groups of one at most:
/// `GROUP_POSITIONS`, `ATTEND_WARPS` and half of `BLOCKS` of the kernels.
const GROUP: usize = 16;
const WARPS: usize = 4;
const WARP_GROUPS_MAX: usize = 3;
/// Tokens of pages whose codes are one piece, of two tiles.
const GROUP_TOKENS: u32 = 2 * TILE_TOKENS as u32;

/// The runs of a row, `[first, len, width]`, levels of all widths, and a scale per coefficient.
#[derive(Clone, Copy)]
pub(crate) struct BitAllocation<'a> {
    pub(crate) runs: &'a [[usize; 3]],
    pub(crate) levels: &'a [f32],
    pub(crate) scales: &'a [f32],
}

/// A position of a row of bytes: a coefficient's high byte, or its low one.
#[derive(Clone, Copy, Default)]
struct BytePosition {
    channel: u16,
    /// Whether the next position has the low byte of the same.
    is_split: bool,
    factor: f32,
}

/// Levels of a width as bytes: what one of the last is worth, and all of them, `[parts, levels]`.
struct LevelBytes {
    unit: f32,
    parts: Vec<Vec<i8>>,
}

impl LevelBytes {
    /// Whole numbers of a unit are a byte, others two.
    fn new(levels: &[f32]) -> Self {
        if let Some(unit) = level_unit(levels) {
            let whole = |level: &f32| (level / unit).round() as i8;
            return Self { unit, parts: vec![levels.iter().map(whole).collect()] };
        }
        let (unit, halves) = crate::lookup::split_bytes(levels);
        let part = |at: usize| halves.iter().map(|bytes| bytes[at]).collect();
        Self { unit, parts: vec![part(0), part(1)] }
    }

    /// Value of byte `part` of a level.
    fn byte_worth(&self, part: usize) -> f32 {
        if part + 1 == self.parts.len() { self.unit } else { 256.0 * self.unit }
    }

    /// All high bytes, then all low ones, of each sixteen or more.
    fn byte_planes(&self) -> Vec<u8> {
        let plane = |part: &Vec<i8>| {
            let mut plane: Vec<u8> = part.iter().map(|byte| *byte as u8).collect();
            plane.resize(plane.len().max(REGISTER_CODES), 0);
            plane
        };
        self.parts.iter().flat_map(plane).collect()
    }

    /// The table of a width: for few codes sixteen bytes of each part, else all parts of each code.
    fn code_table(&self, width: usize) -> Vec<u8> {
        let byte =
            |part: usize, code: usize| self.parts.get(part).map_or(0, |part| part[code] as u8);
        if width > REGISTER_BITS {
            return (0..1 << width).flat_map(|code| [byte(0, code), byte(1, code)]).collect();
        }
        let padded = |part| {
            (0..REGISTER_CODES)
                .map(move |code| if code < 1 << width { byte(part, code) } else { 0 })
        };
        (0..2).flat_map(padded).collect()
    }
}

/// A table of one side of one head.
#[derive(Default)]
struct UnpackTable {
    /// As they lie in a page.
    runs: Vec<[u32; RUN_WORDS]>,
    jobs: Vec<u32>,
    /// In place of jobs, of groups that are not spread: `RunGroup` of `bit_groups.cuh`.
    groups: Vec<[u32; 4]>,
    positions: Vec<BytePosition>,
    levels: Vec<u8>,
    tile_bytes: usize,
}

/// A side, and whether codes of both sides are multiplied in groups as they lie.
#[derive(Clone, Copy)]
pub(crate) struct GroupedSide {
    pub(crate) side: Side,
    pub(crate) grouped: bool,
}

/// Whether all runs are whole groups, for which there is room, and pages two tiles.
pub(crate) fn takes_groups(side: Side, tokens: u32, of: BitAllocation<'_>) -> bool {
    tokens == GROUP_TOKENS && UnpackTable::group_table(side, of).is_some()
}

/// Appends what spreads a side's codes, or says where its groups are if they are multiplied as they
/// lie, to the layer's tables, and says in `shape` where it is.
pub(crate) fn append_unpack(
    GroupedSide { side, grouped }: GroupedSide,
    of: BitAllocation<'_>,
    tables: &mut Vec<u8>,
    shape: &mut SideShape,
) {
    if let Some(groups) = UnpackTable::group_table(side, of).filter(|_| grouped) {
        // Codes are not spread: no shared memory for a tile of bytes.
        shape.spread_row = groups.positions.len() as u32;
        shape.spread_places = shape.spread_row;
        return groups.append_to(tables, shape);
    }
    let mut spread = UnpackTable::new(side, of);
    let coded = spread.positions.len();
    let row = row_of(side, coded);
    let channels = of.runs.iter().filter(|run| run[2] == 0).flat_map(|run| run[0]..run[0] + run[1]);
    match side {
        Side::Key => spread.positions.resize(row, BytePosition::default()),
        Side::Value => spread.positions.extend(channels.map(BytePosition::without_codes)),
    }
    let places = spread.positions.len();
    spread.append_to(tables, shape);
    (shape.spread_row, shape.spread_places) = (row as u32, places as u32);
    shape.spread_bytes = bytes_of_tile(side, row, places) as u32;
}

/// Positions of a row in shared memory: of keys whole steps of the products, of values so many that
/// the words of four lanes are in different banks.
fn row_of(side: Side, positions: usize) -> usize {
    match side {
        Side::Key => positions.next_multiple_of(TILE_TOKENS),
        Side::Value => (positions + ROW_STEP / 2).next_multiple_of(ROW_STEP) - ROW_STEP / 2,
    }
}

/// Shared memory of a tile of bytes. Of values the last row is read as far as the last places.
fn bytes_of_tile(side: Side, row: usize, places: usize) -> usize {
    let last = match side {
        Side::Key => row,
        Side::Value => row.max(places.next_multiple_of(BLOCK_PLACES)),
    };
    QUAD * ((TOKEN_QUADS - 1) * row + last)
}

/// Places of groups of levels of one byte.
fn expected_places(side: Side, dim: usize) -> usize {
    match side {
        // Two runs of an odd number of groups.
        Side::Key => dim.next_multiple_of(2 * GROUP) + 2 * GROUP,
        Side::Value => dim.next_multiple_of(WARPS * GROUP),
    }
}

/// Whether a side that no calibration has said anything of yet is taken to be in groups.
pub(crate) fn expects_groups(side: Side, tokens: u32, dim: usize) -> bool {
    let has_room =
        side == Side::Key || expected_places(side, dim) <= WARPS * WARP_GROUPS_MAX * GROUP;
    dim.is_multiple_of(GROUP) && tokens == GROUP_TOKENS && has_room
}

/// The shape of what no calibration has said yet: groups of levels of one byte, where both sides
/// are [so](expects_groups); else as if all coefficients had codes, one in sixteen of them levels
/// of two bytes, in runs whose last fours are not full.
pub(crate) fn expected_unpack(of: GroupedSide, dim: usize) -> SideShape {
    let GroupedSide { side, grouped } = of;
    if grouped {
        let places = expected_places(side, dim) as u32;
        let (spread_row, spread_places) = (places, places);
        return SideShape { spread_row, spread_places, ..SideShape::default() };
    }
    let positions = dim + dim / 16 + if side == Side::Key { 2 * QUAD } else { 0 };
    let row = row_of(side, positions);
    SideShape {
        spread_bytes: bytes_of_tile(side, row, positions) as u32,
        spread_row: row as u32,
        spread_places: positions as u32,
        ..SideShape::default()
    }
}

/// Sixteen coefficients of a run, of which a warp has one place or, of levels of two bytes, two.
#[derive(Clone, Copy)]
struct RunGroup {
    run: usize,
    /// The first of them, of the run's positions.
    first: usize,
    parts: usize,
    /// Its share of a warp's time, about.
    cost: usize,
}

/// Deals groups of values to warps, widest first, each to the one that has least to do: by warp, as
/// many places for each.
fn deal_groups(mut groups: Vec<RunGroup>) -> Option<Vec<Vec<RunGroup>>> {
    groups.sort_by_key(|group| std::cmp::Reverse((group.parts, group.cost)));
    let all: usize = groups.iter().map(|group| group.parts).sum();
    let places = |warp: &Vec<RunGroup>| warp.iter().map(|group| group.parts).sum::<usize>();
    let deal = |most: usize| {
        let mut warps = vec![Vec::new(); WARPS];
        for group in &groups {
            let cost =
                |warp: &&mut Vec<RunGroup>| warp.iter().map(|group| group.cost).sum::<usize>();
            let has_room = |warp: &&mut Vec<RunGroup>| places(warp) + group.parts <= most;
            warps.iter_mut().filter(has_room).min_by_key(cost)?.push(*group);
        }
        Some(warps)
    };
    (all.div_ceil(WARPS)..=WARP_GROUPS_MAX).find_map(deal)
}

impl BytePosition {
    /// A coefficient without codes.
    fn without_codes(channel: usize) -> Self {
        Self { channel: channel as u16, ..Self::default() }
    }
}

impl UnpackTable {
    fn new(side: Side, of: BitAllocation<'_>) -> Self {
        let mut spread = Self::default();
        for [_, len, width] in of.runs {
            let bytes = TILE_TOKENS * len * width / 8;
            let words = [*len, *width, 0, 1, bytes, spread.tile_bytes, 0, 0];
            spread.runs.push(words.map(|word| word as u32));
            spread.tile_bytes += bytes;
        }
        let coded = of.runs.iter().enumerate().filter(|(_, run)| run[1] > 0 && run[2] > 0);
        let mut coded: Vec<(usize, LevelBytes)> = coded
            .map(|(index, [.., width])| {
                let first = (1 << width) - 2;
                (index, LevelBytes::new(&of.levels[first..first + (1 << width)]))
            })
            .collect();
        // Pairs of bytes first: both of a value are one lane's.
        coded.sort_by_key(|(_, levels)| std::cmp::Reverse(levels.parts.len()));
        for (index, levels) in coded {
            let [_, len, width] = of.runs[index];
            let run = &mut spread.runs[index];
            run[2] = spread.positions.len() as u32;
            run[3] = levels.parts.len() as u32;
            run[7] = spread.levels.len() as u32;
            spread.levels.extend(levels.code_table(width));
            let items = (0..2 * len).step_by(JOB_ITEMS);
            spread.jobs.extend(items.map(|item| (item << 8 | index) as u32));
            let [first, len, _] = of.runs[index];
            spread.append_run(side, first, &of.scales[first..first + len], &levels);
        }
        spread
    }

    /// The positions of a run, from its first channel and the scales of its channels: of keys in
    /// fours of each part, of values parts in turn.
    fn append_run(&mut self, side: Side, first: usize, scales: &[f32], levels: &LevelBytes) {
        let parts = levels.parts.len();
        let step = if side == Side::Key { QUAD } else { 1 };
        for (start, scales) in (first..).step_by(step).zip(scales.chunks(step)) {
            for part in 0..parts {
                let quad = (start..).zip(scales).map(|(channel, scale)| BytePosition {
                    channel: channel as u16,
                    is_split: part + 1 < parts,
                    factor: scale * levels.byte_worth(part),
                });
                self.positions.extend(quad);
                let whole = self.positions.len().next_multiple_of(step);
                self.positions.resize(whole, BytePosition::default());
            }
        }
    }

    /// The table without unpacking, where all runs are whole groups and there is room for them.
    fn group_table(side: Side, of: BitAllocation<'_>) -> Option<Self> {
        if !of.runs.iter().all(|[_, len, _]| len.is_multiple_of(GROUP)) {
            return None;
        }
        let mut spread = Self::default();
        let mut levels = Vec::new();
        for [_, len, width] in of.runs {
            let bytes = TILE_TOKENS * len * width / 8;
            let of_width = (*width > 0).then(|| {
                let first = (1 << width) - 2;
                LevelBytes::new(&of.levels[first..first + (1 << width)])
            });
            let parts = of_width.as_ref().map_or(1, |levels| levels.parts.len());
            let before = spread.tile_bytes;
            let words = [*len, *width, 0, parts, bytes, before, 0, spread.levels.len()];
            spread.runs.push(words.map(|word| word as u32));
            spread.tile_bytes += bytes;
            spread.levels.extend(of_width.iter().flat_map(LevelBytes::byte_planes));
            levels.push(of_width);
        }
        match side {
            Side::Key => spread.key_groups(of, &levels),
            Side::Value => spread.value_groups(of, &levels)?,
        }
        Some(spread)
    }

    /// The kernels' words for a group (for keys a group of two): number `number` of a run and the
    /// next, byte `part` of its levels.
    fn group_words(&self, side: Side, run: usize, number: usize, part: usize) -> [u32; 4] {
        let [len, width, .., bytes, before, _, levels] = self.runs[run];
        let number = number as u32;
        // Words of its first quad of a tile, and of a row of planes.
        let (at, apart) = match side {
            Side::Key => (number * 4 * TILE_TOKENS as u32, len / GROUP as u32 * 4 * 32),
            Side::Value => (number * 4 * GROUP as u32, 4 * len),
        };
        let levels = levels + part as u32 * (1 << width).max(REGISTER_CODES as u32);
        // Planes of one bit are half as long as groups are apart.
        let tokens = TILE_TOKENS as u32;
        let next_bit = (len / GROUP as u32 * tokens / 2).saturating_sub(number * tokens);
        let what = width | (run as u32) << 4 | next_bit.min(255) << 8;
        [2 * before + at, bytes, apart, what | levels << 16]
    }

    /// Groups and positions of keys, by run, byte of a level and group, in the order in which lanes
    /// have their words: neighbours of a lane are of two quads in turn. Two groups are a step,
    /// where a run has an odd one with nothing behind it.
    fn key_groups(&mut self, of: BitAllocation<'_>, levels: &[Option<LevelBytes>]) {
        for (run, ([first, len, _], levels)) in of.runs.iter().zip(levels).enumerate() {
            let Some(levels) = levels else { continue };
            let count = len / GROUP;
            for part in 0..levels.parts.len() {
                let pairs = (0..count).step_by(2);
                let pairs = pairs.map(|number| self.group_words(Side::Key, run, number, part));
                self.groups.extend(pairs.collect::<Vec<_>>());
                let position = |group: usize, at: usize| {
                    let (lane, at) = (at / QUAD, at % QUAD);
                    let quad = group + (lane % 2 + at % 2 * 2) * count;
                    let channel = first + quad * QUAD + lane / 2 * 2 + at / 2;
                    let factor = of.scales[channel] * levels.byte_worth(part);
                    BytePosition { channel: channel as u16, is_split: false, factor }
                };
                for group in 0..count {
                    self.positions.extend((0..GROUP).map(|at| position(group, at)));
                }
                let whole = self.positions.len().next_multiple_of(2 * GROUP);
                self.positions.resize(whole, BytePosition::default());
            }
        }
    }

    /// Places of values: of each warp's groups the even positions, then the odd ones. Those of a
    /// low byte say that another place has their coefficient.
    fn value_groups(&mut self, of: BitAllocation<'_>, levels: &[Option<LevelBytes>]) -> Option<()> {
        let groups = of.runs.iter().enumerate().flat_map(|(run, [_, len, width])| {
            let parts = levels[run].as_ref().map_or(1, |levels| levels.parts.len());
            let cost = parts * (1 + width);
            (0..*len).step_by(GROUP).map(move |first| RunGroup { run, first, parts, cost })
        });
        let warps = deal_groups(groups.collect())?;
        let places = |warp: &Vec<RunGroup>| warp.iter().map(|group| group.parts).sum::<usize>();
        let most = warps.iter().map(places).max().unwrap_or(0);
        let nothing = BytePosition { channel: u16::MAX, ..BytePosition::default() };
        for warp in warps {
            let start = self.groups.len();
            for RunGroup { run, first, parts, .. } in warp {
                for part in 0..parts {
                    self.groups.push(self.group_words(Side::Value, run, first / GROUP, part));
                    let worth = levels[run].as_ref().map_or(0.0, |levels| levels.byte_worth(part));
                    let even_then_odd = (0..GROUP).step_by(2).chain((1..GROUP).step_by(2));
                    self.positions.extend(even_then_odd.map(|at| {
                        let channel = of.runs[run][0] + first + at;
                        let factor = of.scales[channel] * worth;
                        BytePosition { channel: channel as u16, is_split: part > 0, factor }
                    }));
                }
            }
            self.groups.resize(start + most, [0; 4]);
            self.positions.resize(self.groups.len() * GROUP, nothing);
        }
        Some(())
    }

    /// Appends the table and says where it is.
    fn append_to(&self, tables: &mut Vec<u8>, shape: &mut SideShape) {
        tables.resize(tables.len().next_multiple_of(COPY_BYTES), 0);
        shape.entries = tables.len() as u64;
        shape.spread_table = self.append_table(tables) as u32;
    }

    /// Appends the table; gives the bytes of it that are to stand in shared memory.
    fn append_table(&self, tables: &mut Vec<u8>) -> usize {
        let start = tables.len();
        let jobs = self.jobs.len() + self.groups.as_flattened().len();
        let levels_at = 4 * (HEAD_WORDS + RUN_WORDS * RUNS_MAX + jobs);
        let levels_at = levels_at.next_multiple_of(COPY_BYTES);
        let end = (levels_at + self.levels.len()).next_multiple_of(COPY_BYTES);
        let counts = [self.runs.len(), self.jobs.len(), self.tile_bytes, end];
        let missing = RUNS_MAX - self.runs.len();
        let runs = self.runs.iter().copied().chain(std::iter::repeat_n([0; RUN_WORDS], missing));
        let runs = runs.flat_map(|mut run| {
            run[7] += levels_at as u32;
            run
        });
        let words = counts.into_iter().map(|count| count as u32).chain(runs);
        let groups = self.groups.iter().flat_map(|[at, next, apart, what]| {
            [*at, *next, *apart, what + ((levels_at as u32) << 16)]
        });
        let words = words.chain(self.jobs.iter().copied()).chain(groups);
        tables.extend(words.flat_map(u32::to_le_bytes));
        tables.resize(start + levels_at, 0);
        tables.extend(&self.levels);
        tables.resize(start + end, 0);
        for position in &self.positions {
            tables.extend(position.channel.to_le_bytes());
            tables.extend(u16::from(position.is_split).to_le_bytes());
            tables.extend(position.factor.to_le_bytes());
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Levels of all widths: those of few bits on whole levels, others not.
    fn levels() -> Vec<f32> {
        let width = |width: u32| {
            let count = 1u32 << width;
            (0..count).map(move |code| match width {
                0..=4 => (254.0 * code as f32 / (count - 1) as f32).round() - 127.0,
                _ => (code as f32 * 0.37).sin(),
            })
        };
        (1..=8).flat_map(width).collect()
    }

    fn spread(side: Side, runs: &[[usize; 3]]) -> (UnpackTable, SideShape, Vec<u8>) {
        let (levels, scales) = (levels(), vec![0.5; 128]);
        let of = BitAllocation { runs, levels: &levels, scales: &scales };
        let (mut tables, mut shape) = (vec![1; 3], SideShape::default());
        append_unpack(GroupedSide { side, grouped: false }, of, &mut tables, &mut shape);
        assert_eq!(shape.entries, 16);
        (UnpackTable::new(side, of), shape, tables)
    }

    #[test]
    fn positions_are_those_of_pairs_first_and_of_keys_in_fours() {
        let runs = [[0, 5, 6], [5, 3, 3], [8, 30, 0], [38, 26, 1]];
        let (keys, shape, tables) = spread(Side::Key, &runs);
        // Two fours of high and of low bytes each, one four, seven.
        assert_eq!(keys.runs.iter().map(|run| run[2]).collect::<Vec<_>>(), [0, 16, 0, 20]);
        assert_eq!((shape.spread_row, shape.spread_places), (64, 64));
        assert_eq!(shape.spread_bytes, 32 * 64);
        assert_eq!(tables.len() as u32, 16 + shape.spread_table + 8 * 64);
        let channels = |at: std::ops::Range<usize>| -> Vec<u16> {
            keys.positions[at].iter().map(|position| position.channel).collect()
        };
        assert_eq!(channels(0..8), [0, 1, 2, 3, 0, 1, 2, 3]);
        assert_eq!(channels(16..19), [5, 6, 7]);
        let low = keys.positions[4].factor;
        assert_eq!(keys.positions[0].factor, 256.0 * low);
        // The expectation before a calibration is about as large.
        let expected = expected_unpack(GroupedSide { side: Side::Key, grouped: false }, 128);
        assert!((128..192).contains(&expected.spread_row));

        let (values, shape, _) = spread(Side::Value, &runs);
        assert_eq!(values.runs.iter().map(|run| run[2]).collect::<Vec<_>>(), [0, 10, 0, 13]);
        assert!(values.positions[8].is_split && !values.positions[9].is_split);
        assert_eq!((shape.spread_row, shape.spread_places), (40, 39 + 30));
        assert_eq!(shape.spread_bytes, 4 * (7 * 40 + 96));
    }

    #[test]
    fn jobs_are_of_all_codes_and_runs_follow_one_another() {
        let (spread, ..) = spread(Side::Value, &[[0, 40, 4], [40, 16, 2], [56, 8, 0]]);
        assert_eq!(spread.jobs, [0, 64 << 8, 1]);
        let column = |at: usize| spread.runs.iter().map(|run| run[at]).collect::<Vec<_>>();
        assert_eq!((column(4), column(5)), (vec![640, 128, 0], vec![0, 640, 768]));
        assert_eq!(spread.tile_bytes, 768);
    }

    fn groups(side: Side, tokens: u32, runs: &[[usize; 3]]) -> Option<UnpackTable> {
        let (levels, scales) = (levels(), vec![0.5; 256]);
        let of = BitAllocation { runs, levels: &levels, scales: &scales };
        takes_groups(side, tokens, of).then(|| UnpackTable::group_table(side, of).unwrap())
    }

    #[test]
    fn groups_are_of_whole_runs_in_pages_of_two_tiles() {
        let whole = [[0, 32, 3], [32, 16, 1]];
        assert!([16, 32, 48, 128].iter().all(|at| groups(Side::Key, *at, &whole).is_none()));
        assert!(groups(Side::Key, 64, &[[0, 31, 3], [31, 17, 1]]).is_none());
        // For keys a lane takes two quads in turn, as far apart as there are groups.
        let keys = groups(Side::Key, 64, &whole).unwrap();
        let channels: Vec<u16> = keys.positions.iter().map(|of| of.channel).collect();
        assert_eq!(channels[..8], [0, 16, 1, 17, 8, 24, 9, 25]);
        assert_eq!(channels[16..20], [4, 20, 5, 21]);
        assert_eq!(channels[32..36], [32, 40, 33, 41]);
        assert_eq!((channels.len(), keys.tile_bytes), (64, 32 * (32 * 3 + 16) / 8));
        assert!(keys.positions[48..].iter().all(|of| of.factor == 0.0));
        // The first run has 384 bytes of a tile, the second is behind two tiles of it.
        let places =
            |of: &UnpackTable, at: usize| of.groups.iter().map(|g| g[at]).collect::<Vec<_>>();
        let of_keys: [_; 3] = [0, 1, 2].map(|at| places(&keys, at));
        assert_eq!(of_keys, [vec![0, 768], vec![384, 64], vec![256, 128]]);
        let what = [3 | 32 << 8, 1 | 1 << 4 | 16 << 8 | 16 << 16];
        assert_eq!(places(&keys, 3), what);
    }

    #[test]
    fn groups_of_values_are_dealt_to_warps_and_two_bytes_of_a_level_to_one() {
        // Levels of six bits have two bytes.
        let runs = [[0, 16, 6], [16, 32, 2], [48, 16, 1], [64, 16, 0]];
        let values = groups(Side::Value, 64, &runs).unwrap();
        let dealt: Vec<u32> = values.groups.iter().map(|group| group[3] & 15).collect();
        assert_eq!(dealt, [6, 6, 2, 0, 2, 0, 1, 0]);
        // Bytes of its levels, 64 of each part; a row of the second run, and where its second is.
        assert_eq!(values.groups[1][3] >> 16, 64);
        assert_eq!(values.groups[4][..3], [2 * 384 + 64, 256, 128]);
        assert_eq!(values.positions.len(), 16 * 8);
        let channels: Vec<u16> = values.positions.iter().map(|of| of.channel).collect();
        assert_eq!(channels[..10], [0, 2, 4, 6, 8, 10, 12, 14, 1, 3]);
        assert!(!values.positions[0].is_split && values.positions[16].is_split);
        assert_eq!(values.positions[0].factor, 256.0 * values.positions[16].factor);
        // Those without codes have places for outliers; where a warp has no group there is none.
        assert_eq!((channels[5 * 16], channels[7 * 16]), (u16::MAX, 64));
        // More than three of a warp.
        assert!(groups(Side::Value, 64, &[[0, 192, 2]]).is_some());
        assert!(groups(Side::Value, 64, &[[0, 208, 2]]).is_none());
        // More than one of two bytes and one of another.
        assert!(groups(Side::Value, 64, &[[0, 64, 6], [64, 64, 2]]).is_some());
        assert!(groups(Side::Value, 64, &[[0, 80, 6]]).is_none());
    }
}

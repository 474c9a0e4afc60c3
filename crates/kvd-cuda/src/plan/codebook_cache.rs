//! Codebooks: how many entries in registers and shared memory, how often, how lanes exchange them,
//! and among how many thread blocks channels are split.

use super::{CodebookPlan, EntryExchange};
use crate::codebook_table::{HELD_MAX, entry_pairs, held_registers};
use crate::lookup::{COPIES_BYTES, COPIES_MAX, in_registers, stored_bytes};
use kvd_codec::{CodebookScope, Quantizer, SideSpec};
use kvd_core::Side;

/// Shuffles from which exchange through shared memory is cheaper (VQ-LLM §VI-B).
const SHUFFLES_MAX: u32 = 5;
/// Registers of a thread of `vqfloat_vqfloat` without any that hold entries, by the query rows of a
/// kernel: the most of nvcc 13.0.3 for sm_80, sm_89 and sm_90.
const FLOAT_REGISTERS: [(u32, u32); 3] = [(1, 72), (4, 111), (8, 127)];

/// The codebooks of a head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct HeadCodebooks {
    pub(super) entries: u32,
    pub(super) dim: u32,
    pub(super) stages: u32,
    pub(super) sets: u32,
    /// The kernel that looks them up.
    pub(super) by: LookupKernels,
}

/// Which kernels look codebooks up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LookupKernels {
    /// Entries are bytes, held several times, for tensor cores.
    Bytes,
    /// Entries are f16, lanes may hold and exchange them: `codebook_cache.cuh`.
    Floats,
    /// Entries are f16: a pair of sides without a kernel of its own.
    Any,
}

/// The kernels for the codebooks of each side.
pub(super) fn lookup_kernels(
    sides: [&SideSpec; 2],
    on_tensor_cores: [bool; 2],
) -> [LookupKernels; 2] {
    let all = sides.iter().all(|side| matches!(side.quantizer, Quantizer::Vq(_)));
    on_tensor_cores.map(|bytes| match (bytes, all) {
        (true, _) => LookupKernels::Bytes,
        (false, true) => LookupKernels::Floats,
        (false, false) => LookupKernels::Any,
    })
}

impl HeadCodebooks {
    pub(super) fn from_spec(side: &SideSpec, dim: usize, by: LookupKernels) -> Option<Self> {
        let Quantizer::Vq(vq) = side.quantizer else { return None };
        let sets =
            if vq.scope == CodebookScope::Group { dim as u32 / u32::from(vq.dim) } else { 1 };
        let (entries, stages) = (1 << vq.bits, vq.stages.into());
        Some(Self { entries, dim: vq.dim.into(), stages, sets, by })
    }

    pub(super) fn as_bytes(self) -> bool {
        self.by == LookupKernels::Bytes
    }

    /// Bytes of one entry of each codebook.
    pub(super) fn entry_bytes(self) -> u32 {
        if self.as_bytes() {
            return match self.in_registers() {
                true => self.dim,
                false => stored_bytes(self.dim as usize) as u32 * self.sets,
            };
        }
        2 * self.dim * self.stages * self.sets
    }

    pub(super) fn all_entry_bytes(self) -> u32 {
        self.entries * self.entry_bytes()
    }

    pub(super) fn in_registers(self) -> bool {
        let [dim, entries, sets] = [self.dim, self.entries, self.sets].map(|x| x as usize);
        self.as_bytes() && in_registers(dim, entries, sets)
    }

    /// How often all entries stand in so many bytes.
    pub(super) fn whole_copies(self, bytes: u32) -> u32 {
        if !self.as_bytes() || self.in_registers() || bytes < self.all_entry_bytes() {
            return 1;
        }
        let copies = bytes.min(COPIES_BYTES as u32) / self.all_entry_bytes();
        1 << copies.clamp(1, COPIES_MAX as u32).ilog2()
    }

    /// Registers of a lane that hold an entry of each codebook; 0 where kernels hold none.
    fn entry_registers(self, side: Side) -> u32 {
        let pairs = if self.entry_exchange(side) == EntryExchange::SharedMemory {
            0
        } else {
            self.channel_pairs()
        };
        held_registers(pairs, self.stages, self.sets)
    }

    /// Pairs of channels of an entry that lanes take at once.
    fn channel_pairs(self) -> u32 {
        if self.by == LookupKernels::Floats { entry_pairs(self.dim) } else { 0 }
    }

    /// How entries come to the lanes that multiply them.
    fn entry_exchange(self, side: Side) -> EntryExchange {
        // VQ-LLM's count: a lane has an entry, and multiplies two channels.
        let shuffles = self.dim.div_ceil(2) - 1;
        match side {
            Side::Key => EntryExchange::None,
            Side::Value if self.channel_pairs() > 0 && shuffles < SHUFFLES_MAX => {
                EntryExchange::Shuffles(shuffles)
            }
            Side::Value => EntryExchange::SharedMemory,
        }
    }

    /// How they are kept in so much shared memory, and in registers if they are `held`; the channel
    /// split apart.
    pub(super) fn plan_cache(self, side: Side, shared_bytes: u32, held: bool) -> CodebookPlan {
        let registers = if held { HELD_MAX.min(self.entries) } else { 0 };
        let shared = (shared_bytes / self.entry_bytes()).min(self.entries - registers);
        CodebookPlan {
            bytes: self.all_entry_bytes(),
            entry_bytes: self.entry_bytes(),
            entries: self.entries,
            shared,
            copies: self.whole_copies(shared_bytes),
            as_bytes: self.as_bytes(),
            in_registers: self.in_registers(),
            registers,
            exchange: self.entry_exchange(side),
            channel_split: 1,
        }
    }

    /// Units among which the channels of values are split, where the tokens of a head are cut into
    /// `runs`, the GPU holds `blocks` thread blocks for them, and their pages are `page_bytes`. All
    /// units of a run compute its scores and read its pages, so they are no more than there are
    /// thread blocks without work, and than make what is read of codebooks and of pages equal
    /// (VQ-LLM §VI-A, which has partial scores in place of pages).
    pub(super) fn channel_split(self, blocks: u32, runs: u32, page_bytes: f64) -> u32 {
        if self.as_bytes() || self.sets == 1 {
            return 1;
        }
        let codebooks = f64::from(self.all_entry_bytes()) * f64::from(runs);
        let balanced = (codebooks / page_bytes.max(1.0)).sqrt().round() as u32;
        let most = balanced.min(blocks / runs.max(1)).clamp(1, self.sets);
        (1..=most).rev().find(|parts| self.sets.is_multiple_of(*parts)).unwrap_or(1)
    }
}

/// Registers that a kernel for `rows` query rows could take besides, where its launch bounds are
/// `bounds` and the occupancy leaves `slack` more.
pub(super) fn register_slack(rows: u32, bounds: u32, slack: u32) -> u32 {
    let taken = FLOAT_REGISTERS.into_iter().find(|(most, _)| rows <= *most);
    slack + bounds.saturating_sub(taken.map_or(bounds, |(_, registers)| registers))
}

/// Which sides have entries in registers: keys, then values, as the slack lasts.
pub(super) fn sides_in_registers(slack: u32, books: [Option<HeadCodebooks>; 2]) -> [bool; 2] {
    let mut left = slack;
    Side::BOTH.map(|side| {
        let needed = books[side.index()].map_or(0, |books| books.entry_registers(side));
        let fits = needed > 0 && needed <= left;
        left -= if fits { needed } else { 0 };
        fits
    })
}

/// Deals the slack to both sides: every entry once as far as they fit, then what is left to copies
/// of whole codebooks.
pub(super) fn share_slack(slack: u32, books: [Option<HeadCodebooks>; 2]) -> [u32; 2] {
    let wanted = books.map(|books| books.map_or(0, HeadCodebooks::all_entry_bytes));
    let once = deal_bytes(slack, wanted);
    let more = [0, 1].map(|side| match books[side] {
        Some(books) if once[side] == wanted[side] => {
            books.whole_copies(u32::MAX) * wanted[side] - wanted[side]
        }
        _ => 0,
    });
    let more = deal_bytes(slack - once[0] - once[1], more);
    [once[0] + more[0], once[1] + more[1]]
}

/// Deals bytes to both sides: the wanted bytes where they fit, else equal halves and what the other
/// side leaves.
fn deal_bytes(slack: u32, wanted: [u32; 2]) -> [u32; 2] {
    let half = slack / 2;
    let first = wanted[0].min(half.max(slack.saturating_sub(wanted[1])));
    [first, wanted[1].min(slack - first)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_without_codebooks_leaves_its_share_to_the_other() {
        let books = |entries| {
            Some(HeadCodebooks { entries, dim: 8, stages: 1, sets: 1, by: LookupKernels::Any })
        };
        assert_eq!(share_slack(10_000, [None, None]), [0, 0]);
        assert_eq!(share_slack(10_000, [books(4096), None]), [10_000, 0]);
        assert_eq!(share_slack(10_000, [books(4096), books(4096)]), [5000, 5000]);
        assert_eq!(share_slack(10_000, [books(256), books(4096)]), [4096, 5904]);
        assert_eq!(share_slack(10_000, [books(4096), books(256)]), [5904, 4096]);
    }

    #[test]
    fn copies_come_after_whole_codebooks() {
        let books = |entries, dim| {
            Some(HeadCodebooks { entries, dim, stages: 1, sets: 1, by: LookupKernels::Bytes })
        };
        // A kibibyte each: half of what is there, which holds sixteen copies.
        let [keys, values] = share_slack(36 << 10, [books(256, 4), books(256, 4)]);
        assert_eq!([keys, values], [18 << 10; 2]);
        assert_eq!(books(256, 4).unwrap().whole_copies(keys), 16);
        // Large keys before copies of small values.
        assert_eq!(share_slack(36 << 10, [books(4096, 8), books(256, 8)]), [32 << 10, 4 << 10]);
        assert_eq!(books(256, 8).unwrap().whole_copies(4 << 10), 2);
        // Registers hold these.
        assert_eq!(share_slack(36 << 10, [books(16, 2), books(16, 2)]), [32, 32]);
    }

    fn floats(dim: u32, stages: u32, sets: u32) -> HeadCodebooks {
        HeadCodebooks { entries: 256, dim, stages, sets, by: LookupKernels::Floats }
    }

    #[test]
    fn registers_hold_entries_as_far_as_the_slack_lasts() {
        let two = [Some(floats(4, 2, 1)); 2];
        // Four registers a side: keys first.
        assert_eq!(sides_in_registers(8, two), [true, true]);
        assert_eq!(sides_in_registers(7, two), [true, false]);
        assert_eq!(sides_in_registers(3, two), [false, false]);
        let small = [Some(floats(8, 2, 1)), Some(floats(2, 1, 1))];
        assert_eq!(sides_in_registers(7, small), [false, true], "eight, then one");
        // Too many codebooks, entries that lanes do not take whole, kernels that hold none.
        let none = [floats(4, 3, 1), floats(4, 1, 32), floats(6, 1, 1), floats(16, 1, 1)];
        let any = HeadCodebooks { by: LookupKernels::Any, ..floats(4, 1, 1) };
        for books in none.into_iter().chain([any]) {
            assert_eq!(sides_in_registers(99, [Some(books); 2]), [false; 2], "{}", books.dim);
        }
        // Registers left by the launch bounds count, and so does occupancy: fewer rows, more of it.
        let slack = [1, 4, 8].map(|rows| register_slack(rows, 128, 0));
        assert_eq!(slack, [56, 17, 1]);
        assert_eq!(register_slack(8, 128, 40), 41);
    }

    #[test]
    fn entries_are_exchanged_by_fewer_than_five_shuffles() {
        let exchange = |dim| floats(dim, 1, 1).entry_exchange(Side::Value);
        let wanted = [(2, 0), (4, 1), (8, 3)];
        for (dim, shuffles) in wanted {
            assert_eq!(exchange(dim), EntryExchange::Shuffles(shuffles));
            assert_eq!(floats(dim, 1, 1).entry_exchange(Side::Key), EntryExchange::None);
        }
        for dim in [3, 6, 12, 16] {
            assert_eq!(exchange(dim), EntryExchange::SharedMemory, "{dim}");
        }
    }

    #[test]
    fn channels_are_split_where_codebooks_are_more_than_pages_and_thread_blocks_idle() {
        // 32 sets of 2 KiB.
        let books = floats(4, 1, 32);
        let split = |blocks, pages| books.channel_split(blocks, 16, pages);
        assert_eq!(split(400, 2e6), 1);
        assert_eq!(split(400, 0.2e6), 2);
        assert_eq!(split(400, 1e4), 8);
        // All are busy, or so many are not.
        assert_eq!([16, 31, 32, 66].map(|blocks| split(blocks, 1e4)), [1, 1, 2, 4]);
        // At most as many as there are sets, and a divisor of them.
        assert_eq!(split(4000, 1.0), 32);
        assert_eq!(HeadCodebooks { sets: 6, ..books }.channel_split(5, 1, 1.0), 3);
        assert_eq!(
            HeadCodebooks { by: LookupKernels::Bytes, ..books }.channel_split(400, 16, 1.0),
            1
        );
        assert_eq!(floats(4, 1, 1).channel_split(400, 16, 1.0), 1);
    }
}

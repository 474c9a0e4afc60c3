//! Codebooks in shared memory: how many entries, how often.

use super::CodebookPlan;
use crate::lookup::{COPIES_BYTES, COPIES_MAX, in_registers, stored_bytes};
use kvd_codec::{CodebookScope, Quantizer, SideSpec};

/// The codebooks of a head.
#[derive(Clone, Copy)]
pub(super) struct Codebooks {
    pub(super) entries: u32,
    pub(super) dim: u32,
    pub(super) stages: u32,
    pub(super) sets: u32,
    /// Whether kernels hold entries as bytes, and each several times.
    pub(super) as_bytes: bool,
}

impl Codebooks {
    pub(super) fn of(side: &SideSpec, dim: usize, as_bytes: bool) -> Option<Self> {
        let Quantizer::Vq(vq) = side.quantizer else { return None };
        let sets =
            if vq.scope == CodebookScope::Group { dim as u32 / u32::from(vq.dim) } else { 1 };
        let (entries, stages) = (1 << vq.bits, vq.stages.into());
        Some(Self { entries, dim: vq.dim.into(), stages, sets, as_bytes })
    }

    /// Bytes of one entry of each codebook.
    pub(super) fn entry_bytes(self) -> u32 {
        if self.as_bytes {
            return match self.in_registers() {
                true => self.dim,
                false => stored_bytes(self.dim as usize) as u32 * self.sets,
            };
        }
        2 * self.dim * self.stages * self.sets
    }

    pub(super) fn bytes(self) -> u32 {
        self.entries * self.entry_bytes()
    }

    pub(super) fn in_registers(self) -> bool {
        let [dim, entries, sets] = [self.dim, self.entries, self.sets].map(|x| x as usize);
        self.as_bytes && in_registers(dim, entries, sets)
    }

    /// How often all entries stand in so many bytes.
    pub(super) fn copies(self, bytes: u32) -> u32 {
        if !self.as_bytes || self.in_registers() || bytes < self.bytes() {
            return 1;
        }
        let copies = bytes.min(COPIES_BYTES as u32) / self.bytes();
        1 << copies.clamp(1, COPIES_MAX as u32).ilog2()
    }

    /// How they are kept in so much shared memory, beside so many bytes of registers; the channel
    /// split apart.
    pub(super) fn plan(self, shared_bytes: u32, register_bytes: u32) -> CodebookPlan {
        CodebookPlan {
            bytes: self.bytes(),
            entry_bytes: self.entry_bytes(),
            entries: self.entries,
            shared: (shared_bytes / self.entry_bytes()).min(self.entries),
            copies: self.copies(shared_bytes),
            as_bytes: self.as_bytes,
            in_registers: self.in_registers(),
            registers: register_bytes / (2 * self.dim),
            shuffles: self.dim / 2 - self.dim.min(2) / 2,
            channel_split: 1,
        }
    }

    /// Splits of the channels at which both kinds of traffic are equal (VQ-LLM §VI-A): a unit of
    /// one part of the channels loads that part of the codebooks, and the scores of all are added.
    pub(super) fn channel_split(self, splits: u32, rows: u32, tokens: u32) -> u32 {
        let codebooks = f64::from(self.bytes()) * f64::from(splits);
        let reduced = f64::from(rows) * f64::from(tokens) * 8.0;
        ((codebooks / reduced).sqrt() as u32).clamp(1, self.sets.max(1))
    }
}

/// Deals the slack to both sides: every entry once as far as they fit, then what is left to copies
/// of whole codebooks.
pub(super) fn share(slack: u32, books: [Option<Codebooks>; 2]) -> [u32; 2] {
    let wanted = books.map(|books| books.map_or(0, Codebooks::bytes));
    let once = deal(slack, wanted);
    let more = [0, 1].map(|side| match books[side] {
        Some(books) if once[side] == wanted[side] => {
            books.copies(u32::MAX) * wanted[side] - wanted[side]
        }
        _ => 0,
    });
    let more = deal(slack - once[0] - once[1], more);
    [once[0] + more[0], once[1] + more[1]]
}

/// What is wanted where it fits, else equal halves, and what one side leaves to the other.
fn deal(slack: u32, wanted: [u32; 2]) -> [u32; 2] {
    let half = slack / 2;
    let first = wanted[0].min(half.max(slack.saturating_sub(wanted[1])));
    [first, wanted[1].min(slack - first)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_without_codebooks_leaves_its_share_to_the_other() {
        let books =
            |entries| Some(Codebooks { entries, dim: 8, stages: 1, sets: 1, as_bytes: false });
        assert_eq!(share(10_000, [None, None]), [0, 0]);
        assert_eq!(share(10_000, [books(4096), None]), [10_000, 0]);
        assert_eq!(share(10_000, [books(4096), books(4096)]), [5000, 5000]);
        assert_eq!(share(10_000, [books(256), books(4096)]), [4096, 5904]);
        assert_eq!(share(10_000, [books(4096), books(256)]), [5904, 4096]);
    }

    #[test]
    fn copies_come_after_whole_codebooks() {
        let books =
            |entries, dim| Some(Codebooks { entries, dim, stages: 1, sets: 1, as_bytes: true });
        // A kibibyte each: half of what is there, which holds sixteen copies.
        let [keys, values] = share(36 << 10, [books(256, 4), books(256, 4)]);
        assert_eq!([keys, values], [18 << 10; 2]);
        assert_eq!(books(256, 4).unwrap().copies(keys), 16);
        // Large keys before copies of small values.
        assert_eq!(share(36 << 10, [books(4096, 8), books(256, 8)]), [32 << 10, 4 << 10]);
        assert_eq!(books(256, 8).unwrap().copies(4 << 10), 2);
        // Registers hold these.
        assert_eq!(share(36 << 10, [books(16, 2), books(16, 2)]), [32, 32]);
    }
}

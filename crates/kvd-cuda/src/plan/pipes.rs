//! Counted instructions by the pipe of a multiprocessor that executes them. Rates are those on
//! paper; `cargo xtask count` (`xtask/src/count/pipes.rs`) says which pipe an instruction belongs
//! to.

/// Lanes that a multiprocessor issues per clock.
const ISSUED: f64 = 128.0;
/// Lanes of integers, logic, shifts, comparisons and moves per clock, up to 9.0.
const INTEGER: f64 = 64.0;
/// Products of integers per clock; on 8.0 they share a pipe with floats.
const MULTIPLY: f64 = 64.0;
/// Powers, counts of bits and conversions per clock.
const SPECIAL: f64 = 16.0;
/// Loads, stores and shuffles per clock, without bank conflicts.
const MEMORY: f64 = 32.0;

/// Lane instructions of a stored value by the pipe that takes them; tensor cores, branches and what
/// a warp does once are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PipeCounts {
    /// Sums of integers, logic, shifts, comparisons, moves.
    pub integer: f64,
    /// Products of integers.
    pub multiply: f64,
    /// Sums and products of floats.
    pub float: f64,
    /// Powers, counts of bits, conversions.
    pub special: f64,
    /// Loads, stores, shuffles.
    pub memory: f64,
}

impl PipeCounts {
    /// In the order of the fields.
    pub(super) const fn new([integer, multiply, float, special, memory]: [f64; 5]) -> Self {
        Self { integer, multiply, float, special, memory }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            integer: self.integer + other.integer,
            multiply: self.multiply + other.multiply,
            float: self.float + other.float,
            special: self.special + other.special,
            memory: self.memory + other.memory,
        }
    }

    pub(super) fn times(self, by: f64) -> Self {
        Self {
            integer: self.integer * by,
            multiply: self.multiply * by,
            float: self.float * by,
            special: self.special * by,
            memory: self.memory * by,
        }
    }

    /// The pipe that takes longest, in slots of the schedulers: as many instructions are issued in
    /// its time as it would take by that alone.
    pub(super) fn longest_pipe(self, compute: [u32; 2]) -> (f64, &'static str) {
        // 8.0 has one pipe of floats, which takes products of integers too.
        let multiply = if compute == [8, 0] { self.multiply + self.float } else { self.multiply };
        let pipes = [
            (self.integer * ISSUED / INTEGER, "integers"),
            (multiply * ISSUED / MULTIPLY, "products"),
            (self.special * ISSUED / SPECIAL, "counts of bits"),
            (self.memory * ISSUED / MEMORY, "loads"),
        ];
        let longer = |a: (f64, &'static str), b: (f64, &'static str)| if b.0 > a.0 { b } else { a };
        pipes.into_iter().fold((0.0, "integers"), longer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_pipe_is_by_what_it_takes_a_clock() {
        let of = |pipes| PipeCounts::new(pipes).longest_pipe([9, 0]);
        assert_eq!(of([3.0, 1.0, 4.0, 0.1, 1.0]), (6.0, "integers"));
        assert_eq!(of([3.0, 1.0, 4.0, 0.1, 2.0]), (8.0, "loads"));
        assert_eq!(of([3.0, 1.0, 4.0, 1.1, 2.0]), (8.8, "counts of bits"));
        // Of an A100 products of integers and of floats are of one pipe.
        let a100 = PipeCounts::new([3.0, 1.0, 4.0, 0.1, 1.0]).longest_pipe([8, 0]);
        assert_eq!(a100, (10.0, "products"));
    }

    #[test]
    fn pipes_add_up() {
        let one = PipeCounts::new([1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(one.plus(one), one.times(2.0));
    }
}

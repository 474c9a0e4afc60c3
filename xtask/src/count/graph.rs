//! The blocks of a kernel, which follows which, and its loops.

use super::listing::Kernel;
use std::collections::BTreeSet;
use std::ops::Range;

/// Instructions that are executed together.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) range: Range<usize>,
    pub(super) next: Vec<usize>,
}

/// A natural loop: all blocks from which its head is reached again without leaving it.
#[derive(Debug)]
pub(super) struct Loop {
    pub(super) head: usize,
    pub(super) blocks: BTreeSet<usize>,
    /// Blocks that go back to the head.
    pub(super) latches: Vec<usize>,
}

#[derive(Debug)]
pub(super) struct Graph {
    pub(super) blocks: Vec<Block>,
    /// Those with fewer blocks first, so that a loop comes after all within it.
    pub(super) loops: Vec<Loop>,
}

/// Where an instruction leads: whether to the next one, and to which labels.
fn leads(kernel: &Kernel, at: usize) -> (bool, Vec<usize>) {
    let instruction = &kernel.instructions[at];
    let to_labels = || {
        let labels = instruction.targets().filter_map(|label| kernel.labels.get(label));
        labels.copied().filter(|to| *to < kernel.instructions.len()).collect()
    };
    match instruction.operation() {
        // To the code for lanes that do not run together, which they do here.
        "BRA" if instruction.opcode.starts_with("BRA.DIV") => (true, Vec::new()),
        "BRA" => {
            let another = instruction.operands.contains(',');
            (instruction.predicated || another, to_labels())
        }
        "BRX" | "JMX" | "JMP" => (instruction.predicated, to_labels()),
        "EXIT" | "RET" | "KILL" => (instruction.predicated, Vec::new()),
        _ => (true, Vec::new()),
    }
}

/// Whether a block ends behind an instruction.
fn ends_block(kernel: &Kernel, at: usize) -> bool {
    let operation = kernel.instructions[at].operation();
    // `BREAK` only takes lanes out of those that meet at a barrier: the next instruction follows.
    ["BRA", "BRX", "JMX", "JMP", "EXIT", "RET", "KILL", "CALL"].contains(&operation)
}

impl Graph {
    pub(super) fn of(kernel: &Kernel) -> Self {
        let count = kernel.instructions.len();
        let mut starts: BTreeSet<usize> = kernel.labels.values().copied().collect();
        starts.insert(0);
        starts.extend((0..count).filter(|at| ends_block(kernel, *at)).map(|at| at + 1));
        let starts: Vec<usize> = starts.into_iter().filter(|at| *at < count).collect();
        let block_of = |at: usize| starts.partition_point(|start| *start <= at) - 1;
        let blocks = starts.iter().enumerate().map(|(number, start)| {
            let end = starts.get(number + 1).copied().unwrap_or(count);
            let (falls, labels) = leads(kernel, end - 1);
            let mut next: Vec<usize> = labels.into_iter().map(block_of).collect();
            if falls && end < count {
                next.push(number + 1);
            }
            next.dedup();
            Block { range: *start..end, next }
        });
        let mut graph = Self { blocks: blocks.collect(), loops: Vec::new() };
        graph.loops = graph.natural_loops();
        graph
    }

    /// The whole kernel as one more loop, that turns once; its last instructions lead back.
    pub(super) fn add_whole(&mut self) {
        let blocks: BTreeSet<usize> = self.order().into_iter().collect();
        let ends = |block: &usize| self.blocks[*block].next.is_empty();
        let latches = blocks.iter().copied().filter(ends).collect();
        self.loops.push(Loop { head: 0, blocks, latches });
    }

    /// Whether every way to a block leads through each block, by the block and that one.
    pub(super) fn leads_to(&self) -> impl Fn(usize, usize) -> bool + use<> {
        let nearest = self.dominators(&self.order());
        move |above, block| nearest[block].is_some() && dominates(&nearest, above, block)
    }

    fn natural_loops(&self) -> Vec<Loop> {
        let order = self.order();
        let dominators = self.dominators(&order);
        let mut loops: Vec<Loop> = Vec::new();
        for &latch in &order {
            for &head in &self.blocks[latch].next {
                if !dominates(&dominators, head, latch) {
                    continue;
                }
                if !loops.iter().any(|known| known.head == head) {
                    loops.push(Loop { head, blocks: BTreeSet::from([head]), latches: Vec::new() });
                }
                if let Some(known) = loops.iter_mut().find(|known| known.head == head) {
                    known.latches.push(latch);
                }
            }
        }
        let before = self.before();
        for known in &mut loops {
            let mut open = known.latches.clone();
            while let Some(block) = open.pop() {
                // What nothing leads to is in no loop.
                if dominators[block].is_some() && known.blocks.insert(block) {
                    open.extend(&before[block]);
                }
            }
        }
        loops.sort_by_key(|known| known.blocks.len());
        loops
    }

    /// Blocks before each.
    fn before(&self) -> Vec<Vec<usize>> {
        let mut before = vec![Vec::new(); self.blocks.len()];
        for (number, block) in self.blocks.iter().enumerate() {
            for &next in &block.next {
                before[next].push(number);
            }
        }
        before
    }

    /// Blocks that are reached, each before those that it alone leads to.
    fn order(&self) -> Vec<usize> {
        let mut seen = vec![false; self.blocks.len()];
        let mut done = Vec::new();
        let mut open = vec![(0, 0)];
        if self.blocks.is_empty() {
            return done;
        }
        seen[0] = true;
        while let Some((block, at)) = open.pop() {
            let Some(&next) = self.blocks[block].next.get(at) else {
                done.push(block);
                continue;
            };
            open.push((block, at + 1));
            if !seen[next] {
                seen[next] = true;
                open.push((next, 0));
            }
        }
        done.reverse();
        done
    }

    /// The nearest block through which every way to a block leads (Cooper, Harvey and Kennedy);
    /// none of what is not reached.
    fn dominators(&self, order: &[usize]) -> Vec<Option<usize>> {
        let mut place = vec![usize::MAX; self.blocks.len()];
        for (at, &block) in order.iter().enumerate() {
            place[block] = at;
        }
        let before = self.before();
        let mut nearest = vec![None; self.blocks.len()];
        if let Some(&first) = order.first() {
            nearest[first] = Some(first);
        }
        let mut changed = true;
        while changed {
            changed = false;
            for &block in order.iter().skip(1) {
                let known = before[block].iter().copied().filter(|b| nearest[*b].is_some());
                let common = known.reduce(|a, b| meet(&nearest, &place, a, b));
                if common.is_some() && nearest[block] != common {
                    nearest[block] = common;
                    changed = true;
                }
            }
        }
        nearest
    }
}

/// The nearest block through which all ways to both lead.
fn meet(nearest: &[Option<usize>], place: &[usize], mut a: usize, mut b: usize) -> usize {
    while a != b {
        let later = if place[a] > place[b] { &mut a } else { &mut b };
        match nearest[*later] {
            Some(up) if up != *later => *later = up,
            _ => return *later,
        }
    }
    a
}

fn dominates(nearest: &[Option<usize>], above: usize, mut block: usize) -> bool {
    while block != above {
        match nearest[block] {
            Some(up) if up != block => block = up,
            _ => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::super::listing::parse;
    use super::*;

    #[test]
    fn loops_are_found_within_each_other() {
        let listing = parse(
            "\t.section\t.text.k,\"ax\"
 /*0000*/ MOV R1, R2 ;
.L_1:
 /*0010*/ MOV R1, R2 ;
.L_2:
 /*0020*/ @P0 BRA `(.L_2) ;
 /*0030*/ @P1 BRA `(.L_3) ;
 /*0040*/ BRA.DIV UR4, `(.L_4) ;
 /*0050*/ BRA P2, `(.L_1) ;
.L_3:
 /*0060*/ @P3 BRA `(.L_1) ;
 /*0070*/ EXIT ;
.L_4:
 /*0080*/ BRA `(.L_3) ;
",
        );
        let graph = Graph::of(&listing.kernels[0]);
        let starts: Vec<usize> = graph.blocks.iter().map(|block| block.range.start).collect();
        assert_eq!(starts, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        let of = |at: usize| graph.loops[at].blocks.iter().copied().collect::<Vec<_>>();
        assert_eq!((of(0), of(1)), (vec![2], vec![1, 2, 3, 4, 5, 6]));
        assert_eq!(graph.loops[1].latches.len(), 2);
        assert_eq!(graph.loops.len(), 2);
    }

    #[test]
    fn lanes_that_leave_a_barrier_go_on() {
        let listing = parse(
            "\t.section\t.text.k,\"ax\"
.L_1:
 /*0000*/ BREAK B2 ;
 /*0010*/ @P0 BREAK B2 ;
 /*0020*/ IMMA R1, R2, R3 ;
 /*0030*/ @P1 BRA `(.L_1) ;
 /*0040*/ EXIT ;
",
        );
        let graph = Graph::of(&listing.kernels[0]);
        assert_eq!(graph.blocks[0].range, 0..4);
        assert_eq!(graph.loops[0].blocks, BTreeSet::from([0]));
    }
}

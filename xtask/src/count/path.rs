//! The way through a loop that takes most instructions, of those that leave out what is not
//! executed.

use super::graph::{Graph, Loop};
use std::collections::HashMap;

/// What a block that is left out costs: more than any way around it.
const LEFT_OUT: f64 = 1e9;

/// What a copy of a loop costs, and a loop that does not turn: a little more than a way around
/// them, and less than a way around what is beside them.
const UNLIKELY: f64 = -1.0;

/// A branch of which both sides may be executed, and how many instructions the one that was taken
/// has more, in one turn.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TwoSided {
    /// The instruction.
    pub(super) branch: usize,
    pub(super) more: f64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Path {
    /// How often each block is executed in a turn of the loop.
    pub(super) blocks: HashMap<usize, f64>,
    /// How often each loop within it turns, all in all.
    pub(super) loops: HashMap<usize, f64>,
    pub(super) two_sided: Vec<TwoSided>,
}

/// How much a block is to be gone around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Avoid {
    No,
    /// Where there is a way: a copy of a loop that turns elsewhere, what another warp does.
    IfPossible,
    /// It is not executed.
    Always,
}

pub(super) struct Paths<'a> {
    pub(super) graph: &'a Graph,
    pub(super) avoid: &'a [Avoid],
    /// Of each loop.
    pub(super) turns: &'a [f64],
    /// What a turn of each loop takes at most, as far as known.
    costs: Vec<f64>,
}

/// A block of a loop, or a loop within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Node {
    Block(usize),
    Loop(usize),
}

/// The best that follows a node, and which node it begins with.
type Best = HashMap<Node, (f64, Option<Node>)>;

impl<'a> Paths<'a> {
    pub(super) fn new(graph: &'a Graph, avoid: &'a [Avoid], turns: &'a [f64]) -> Self {
        let mut paths = Self { graph, avoid, turns, costs: Vec::new() };
        for number in 0..graph.loops.len() {
            // Loops within it come before it.
            let best = paths.best(number);
            let head = paths.node(number, graph.loops[number].head);
            paths.costs.push(best.get(&head).map_or(0.0, |(cost, _)| *cost));
        }
        paths
    }

    /// The longest way through one turn of a loop.
    pub(super) fn longest(&self, number: usize) -> Path {
        let mut path = Path::default();
        self.add(number, 1.0, &mut path);
        path
    }

    fn add(&self, number: usize, times: f64, path: &mut Path) {
        let best = self.best(number);
        let mut next = Some(self.node(number, self.graph.loops[number].head));
        while let Some(node) = next {
            next = best.get(&node).and_then(|(_, next)| *next);
            match node {
                Node::Block(block) => {
                    *path.blocks.entry(block).or_default() += times;
                    path.two_sided.extend(self.two_sided(number, &best, block, next));
                }
                Node::Loop(inner) => {
                    let turns = times * self.turns[inner];
                    *path.loops.entry(inner).or_default() += turns;
                    if turns > 0.0 {
                        self.add(inner, turns, path);
                    }
                }
            }
        }
    }

    fn two_sided(
        &self,
        number: usize,
        best: &Best,
        block: usize,
        next: Option<Node>,
    ) -> Option<TwoSided> {
        let taken = next.and_then(|next| best.get(&next)).map_or(0.0, |(cost, _)| *cost);
        let others = self.after(number, Node::Block(block)).into_iter();
        let others = others.filter(|node| Some(*node) != next);
        let other = others.filter_map(|node| best.get(&node)).map(|(cost, _)| *cost);
        let other = other.fold(f64::NEG_INFINITY, f64::max);
        let branch = self.graph.blocks[block].range.end - 1;
        (taken - other < LEFT_OUT / 2.0).then_some(TwoSided { branch, more: taken - other })
    }

    /// The largest loop in another that has a block, or the block.
    fn node(&self, number: usize, block: usize) -> Node {
        let known = &self.graph.loops[number];
        let within = self.graph.loops[..number].iter().enumerate().rev();
        let mut within = within.filter(|(_, inner)| {
            inner.head != known.head
                && inner.blocks.contains(&block)
                && inner.blocks.is_subset(&known.blocks)
        });
        within.next().map_or(Node::Block(block), |(inner, _)| Node::Loop(inner))
    }

    fn blocks_of(&self, node: Node) -> Vec<usize> {
        match node {
            Node::Block(block) => vec![block],
            Node::Loop(inner) => self.graph.loops[inner].blocks.iter().copied().collect(),
        }
    }

    /// What follows a node in a turn of a loop.
    fn after(&self, number: usize, node: Node) -> Vec<Node> {
        let known: &Loop = &self.graph.loops[number];
        let mut after = Vec::new();
        for block in self.blocks_of(node) {
            for &next in &self.graph.blocks[block].next {
                if next != known.head && known.blocks.contains(&next) {
                    let to = self.node(number, next);
                    if to != node && !after.contains(&to) {
                        after.push(to);
                    }
                }
            }
        }
        after
    }

    fn cost(&self, node: Node) -> f64 {
        match node {
            Node::Block(block) => {
                let count = self.graph.blocks[block].range.len() as f64;
                match self.avoid[block] {
                    Avoid::No => count,
                    Avoid::IfPossible => UNLIKELY,
                    Avoid::Always => -LEFT_OUT,
                }
            }
            Node::Loop(inner) if self.turns[inner] == 0.0 => UNLIKELY,
            Node::Loop(inner) => self.costs[inner] * self.turns[inner],
        }
    }

    /// Of each node of a loop from which its head is reached again.
    fn best(&self, number: usize) -> Best {
        let known = &self.graph.loops[number];
        let mut best = Best::new();
        // Nodes whose followers are not all known yet, the last of them first.
        let mut open = vec![(self.node(number, known.head), false)];
        let mut seen = Vec::new();
        while let Some((node, is_ready)) = open.pop() {
            let after = self.after(number, node);
            if !is_ready {
                if !seen.contains(&node) {
                    seen.push(node);
                    open.push((node, true));
                    open.extend(after.into_iter().map(|next| (next, false)));
                }
                continue;
            }
            let ends = self.blocks_of(node).iter().any(|block| known.latches.contains(block));
            let mut most = ends.then_some((0.0, None));
            for next in after {
                let Some((cost, _)) = best.get(&next) else { continue };
                if most.is_none_or(|(most, _)| *cost > most) {
                    most = Some((*cost, Some(next)));
                }
            }
            if let Some((cost, next)) = most {
                best.insert(node, (cost + self.cost(node), next));
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::super::listing::parse;
    use super::*;

    /// Block 0 is before the loop; 1 leads to 2 or 3, and 3 is longer; 4 is a loop of its own.
    const TEXT: &str = "\t.section\t.text.k,\"ax\"
 /*0000*/ MOV R1, R2 ;
.L_1:
 /*0010*/ @P0 BRA `(.L_2) ;
 /*0020*/ BRA `(.L_3) ;
.L_2:
 /*0030*/ MOV R1, R2 ;
 /*0040*/ MOV R1, R2 ;
.L_3:
 /*0050*/ MOV R1, R2 ;
 /*0060*/ @P1 BRA `(.L_3) ;
 /*0070*/ @P2 BRA `(.L_1) ;
 /*0080*/ EXIT ;
";

    #[test]
    fn the_longer_side_is_taken_unless_it_is_left_out() {
        let listing = parse(TEXT);
        let graph = Graph::of(&listing.kernels[0]);
        let mut avoid = [Avoid::No; 7];
        let path = Paths::new(&graph, &avoid, &[3.0, 1.0]).longest(1);
        assert_eq!(path.blocks, HashMap::from([(1, 1.0), (3, 1.0), (4, 3.0), (5, 1.0)]));
        assert_eq!(path.loops, HashMap::from([(0, 3.0)]));
        assert_eq!(path.two_sided, [TwoSided { branch: 1, more: 1.0 }]);
        avoid[3] = Avoid::Always;
        let path = Paths::new(&graph, &avoid, &[3.0, 1.0]).longest(1);
        assert_eq!(path.blocks, HashMap::from([(1, 1.0), (2, 1.0), (4, 3.0), (5, 1.0)]));
        assert_eq!(path.two_sided, []);
    }
}

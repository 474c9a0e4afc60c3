//! A kernel's count: what a thread issues in a turn of the loop over tiles, and where.

use super::codecs::Row;
use super::graph::{Graph, Loop};
use super::listing::{Chain, Frame, Kernel, Listing};
use super::marks::{self, Rules};
use super::path::{Avoid, Path, Paths};
use super::pipes::{self, Pipe};
use super::source::Source;
use super::turns::{Turning, Turns};
use super::{VALUES_OF_THREAD, WARPS};
use crate::report::Report;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Functions whose instructions, and those of what they call, are counted together.
const VERBS: &[(&str, &str)] = &[
    ("start", "stage"),
    ("stage", "stage"),
    ("wait_for_tile", "stage"),
    ("Stops::stage", "stage"),
    ("Scores::fold", "fold"),
    ("Scores::tile", "scores"),
    ("Scores::groups", "scores"),
    ("Scores::chosen", "scores"),
    ("Softmax::absorb", "softmax"),
    ("Sums::multiply_tile", "multiply"),
    ("Sums::absorb", "absorb"),
    ("Tensor::spread", "spread"),
    ("Decoder::advance", "decode"),
];
const REST: &str = "rest";

/// Instructions of a block whose lines say little of what it is for.
const GUARD: usize = 2;

/// Values of a turn, or a page, for each thread.
fn values(row: &Row) -> f64 {
    VALUES_OF_THREAD * f64::from(row.tiles)
}

/// Of a turn, by name, most first.
type Parts = Vec<(String, f64)>;

pub(super) struct Count {
    pub(super) total: f64,
    verbs: Parts,
    functions: Parts,
    operations: Parts,
    pipes: Parts,
    loops: Vec<String>,
    two_sided: Vec<String>,
    notes: Vec<String>,
    blocks: Vec<String>,
}

struct Counter<'a> {
    listing: &'a Listing,
    kernel: &'a Kernel,
    sources: &'a [Source],
    graph: Graph,
    turnings: Vec<Turning>,
    tiles: usize,
}

pub(super) fn count(
    listing: &Listing,
    kernel: &Kernel,
    sources: &[Source],
    row: &Row,
) -> Result<Count> {
    let rules = row.rules;
    let mut graph = Graph::of(kernel);
    if row.whole {
        graph.add_whole();
    }
    let turnings = Turns { kernel, listing, sources, graph: &graph }.find(rules);
    let tiles =
        if row.whole { Some(graph.loops.len() - 1) } else { loop_over_tiles(&graph, kernel) };
    let tiles = tiles.context("no loop has a barrier")?;
    let counter = Counter { listing, kernel, sources, graph, turnings, tiles };
    Ok(counter.count(row))
}

/// The outermost loop with a barrier; of several the one with most instructions.
fn loop_over_tiles(graph: &Graph, kernel: &Kernel) -> Option<usize> {
    let instructions = |known: &Loop| {
        let ranges = known.blocks.iter().map(|block| graph.blocks[*block].range.clone());
        ranges.flatten().collect::<Vec<_>>()
    };
    let with_barrier = graph.loops.iter().enumerate().filter(|(_, known)| {
        instructions(known).iter().any(|at| kernel.instructions[*at].operation() == "BAR")
    });
    with_barrier.max_by_key(|(_, known)| instructions(known).len()).map(|(number, _)| number)
}

impl Counter<'_> {
    fn count(&self, row: &Row) -> Count {
        let rules = row.rules;
        let mut parts: [BTreeMap<String, f64>; 4] = Default::default();
        let mut notes = BTreeSet::new();
        let mut path = Path::default();
        let mut blocks = Vec::new();
        let mut total = 0.0;
        let mut by_warp = Vec::new();
        let (frames, missing) = marks::left_out(self.sources, rules);
        for text in missing {
            notes.insert(format!("no line of the source has `{text}`"));
        }
        for warp in 0..WARPS {
            let of_others = marks::of_others(self.sources, warp, row.query_rows());
            let mut avoid = self.avoid(&frames, &of_others, &mut notes);
            self.avoid_unrolled(rules, &mut avoid);
            let turns: Vec<f64> = self.turnings.iter().map(|turning| turning.turns).collect();
            let of_warp = Paths::new(&self.graph, &avoid, &turns).longest(self.tiles);
            if warp == 0 {
                blocks = self.blocks(&of_warp, &avoid);
                path = of_warp.clone();
            }
            let path = of_warp;
            let mut of_warp = 0.0;
            for (&block, &times) in &path.blocks {
                if avoid[block] == Avoid::Always {
                    notes.insert(format!("could not leave out {}", self.place_of_block(block)));
                }
                for at in self.graph.blocks[block].range.clone() {
                    let names = self.names(at);
                    let times = if row.again.contains(&&*names[0]) { 2.0 * times } else { times };
                    of_warp += times;
                    for (part, name) in parts.iter_mut().zip(names) {
                        *part.entry(name).or_default() += times / WARPS as f64;
                    }
                }
            }
            total += of_warp / WARPS as f64;
            by_warp.push(of_warp);
        }
        for verb in row.again {
            notes.insert(format!("{verb} are found for one of the tiles, and counted twice"));
        }
        if by_warp.iter().any(|of_warp| (of_warp - by_warp[0]).abs() > 0.5) {
            notes.insert(format!("warps take {by_warp:.0?}: their mean is counted"));
        }
        let [verbs, functions, operations, pipes] = parts.map(sorted);
        let loops = self.loops(&path);
        let two_sided = self.two_sided(&path);
        let notes = notes.into_iter().collect();
        Count { total, verbs, functions, operations, pipes, loops, two_sided, notes, blocks }
    }

    /// The blocks of the loop over tiles.
    fn blocks(&self, path: &Path, avoid: &[Avoid]) -> Vec<String> {
        let address = |block: usize| format!("{:x}", self.graph.blocks[block].range.start * 16);
        let all = self.graph.loops[self.tiles].blocks.iter();
        let lines = all.map(|&number| {
            let block = &self.graph.blocks[number];
            let times = path.blocks.get(&number).copied().unwrap_or(0.0);
            let next: Vec<String> = block.next.iter().map(|next| address(*next)).collect();
            format!(
                "{times:4.1} times {:3} at {} to {} {:?}: {}",
                block.range.len(),
                address(number),
                next.join(", "),
                avoid[number],
                self.place(block.range.start)
            )
        });
        lines.collect()
    }

    fn chain(&self, at: usize) -> &Chain {
        &self.listing.chains[self.kernel.instructions[at].chain]
    }

    /// Blocks most of whose instructions are not executed, copies of loops that turn elsewhere, and
    /// calls: of divisions of numbers that are no usual ones. Not what leads to products.
    fn avoid(
        &self,
        frames: &HashSet<Frame>,
        of_others: &HashSet<Frame>,
        notes: &mut BTreeSet<String>,
    ) -> Vec<Avoid> {
        let mut avoid = Vec::new();
        for (number, block) in self.graph.blocks.iter().enumerate() {
            let is_work = |at: &usize| !self.kernel.instructions[*at].is_control();
            let work: Vec<usize> = block.range.clone().filter(is_work).collect();
            let is_most = |of: &HashSet<Frame>| {
                let is_in = |at: &&usize| self.chain(**at).iter().any(|frame| of.contains(frame));
                2 * work.iter().filter(is_in).count() > work.len()
            };
            let last = &self.kernel.instructions[block.range.end - 1];
            let calls = last.operation() == "CALL";
            if calls && self.graph.loops[self.tiles].blocks.contains(&number) {
                notes.insert(format!("a call was left out: {}", last.operands));
            }
            avoid.push(match () {
                () if calls || is_most(frames) => Avoid::Always,
                () if is_most(of_others) => Avoid::IfPossible,
                () => Avoid::No,
            });
        }
        for block in self.guards(&avoid) {
            avoid[block] = Avoid::No;
        }
        for turning in &self.turnings {
            self.avoid_copies(turning, &mut avoid);
        }
        avoid
    }

    /// Blocks that are left out for one or two instructions, though no other way leads to products
    /// that are not: what the compiler moved there may be another statement's.
    fn guards(&self, avoid: &[Avoid]) -> Vec<usize> {
        let leads_to = self.graph.leads_to();
        let is_in = |block: &usize| self.graph.loops[self.tiles].blocks.contains(block);
        let has_products = |block: &usize| {
            let mut range = self.graph.blocks[*block].range.clone();
            range.any(|at| ["IMMA", "HMMA"].contains(&self.kernel.instructions[at].operation()))
        };
        let kept = |block: &usize| avoid[*block] == Avoid::No && has_products(block);
        let products: Vec<usize> = (0..avoid.len()).filter(is_in).filter(kept).collect();
        let is_small = |block: &usize| {
            avoid[*block] == Avoid::Always && self.graph.blocks[*block].range.len() <= GUARD
        };
        let small = (0..avoid.len()).filter(is_in).filter(is_small);
        small.filter(|block| products.iter().any(|to| leads_to(*block, *to))).collect()
    }

    /// Goes around copies of a loop's body: the loop itself is taken to turn as often as all do.
    fn avoid_copies(&self, turning: &Turning, avoid: &mut [Avoid]) {
        let turns = self.turns();
        for (number, avoid) in avoid.iter_mut().enumerate() {
            let is_loop = self.turnings.iter().zip(&self.graph.loops).any(|(other, known)| {
                other.origin == turning.origin && known.blocks.contains(&number)
            });
            if *avoid == Avoid::No && !is_loop && turns.is_body(number, turning) {
                *avoid = Avoid::IfPossible;
            }
        }
    }

    fn turns(&self) -> Turns<'_> {
        let Self { kernel, listing, sources, .. } = *self;
        Turns { kernel, listing, sources, graph: &self.graph }
    }

    /// Leaves out what unrolled turns hold that are not executed.
    fn avoid_unrolled(&self, rules: &[Rules], avoid: &mut [Avoid]) {
        for &(text, operation, kept) in rules.iter().flat_map(|rules| rules.unrolled) {
            self.avoid_turns((text, operation), |turn| turn >= kept, avoid);
        }
        for &(text, operation, turns) in rules.iter().flat_map(|rules| rules.skipped) {
            self.avoid_turns((text, operation), |turn| !turns[turn % turns.len()], avoid);
        }
    }

    /// Leaves out turns of unrolled loops, which an operation tells apart.
    fn avoid_turns(
        &self,
        (text, operation): (&str, &str),
        is_left_out: impl Fn(usize) -> bool,
        avoid: &mut [Avoid],
    ) {
        let mut seen: BTreeMap<usize, usize> = BTreeMap::new();
        for (number, block) in self.graph.blocks.iter().enumerate() {
            for at in block.range.clone() {
                let chain = self.kernel.instructions[at].chain;
                let is_of_loop = |frame: &Frame| {
                    let mut loops = self.sources[frame.file].loops.iter();
                    loops
                        .any(|known| known.lines.contains(&frame.line) && known.text.contains(text))
                };
                if self.kernel.instructions[at].operation() == operation
                    && self.graph.loops[self.tiles].blocks.contains(&number)
                    && self.listing.chains[chain].iter().any(is_of_loop)
                {
                    let seen = seen.entry(chain).or_default();
                    if is_left_out(*seen) {
                        avoid[number] = Avoid::Always;
                    }
                    *seen += 1;
                }
            }
        }
    }

    /// Its verb, its innermost function, its operation and its pipe.
    fn names(&self, at: usize) -> [String; 4] {
        let functions: Vec<&str> = self.functions(at).collect();
        let verb = functions.iter().find_map(|function| {
            VERBS.iter().find(|(name, _)| name == function).map(|(_, verb)| *verb)
        });
        let innermost = functions.first().copied().unwrap_or("?");
        let operation = self.kernel.instructions[at].operation();
        let pipe = pipes::of(operation).map_or("of no known pipe", Pipe::name);
        [verb.unwrap_or(REST), innermost, operation, pipe].map(str::to_owned)
    }

    /// Functions that an instruction is in, the innermost first.
    fn functions(&self, at: usize) -> impl Iterator<Item = &str> {
        self.chain(at).iter().filter_map(|frame| {
            self.sources[frame.file].function(frame.line).map(|function| function.name.as_str())
        })
    }

    /// The source of an instruction: functions and the innermost line.
    fn place(&self, at: usize) -> String {
        let functions: Vec<&str> = self.functions(at).take(3).collect();
        let line = self.chain(at).iter().find_map(|frame| {
            let line = self.sources[frame.file].line(frame.line);
            (!line.is_empty()).then_some(line)
        });
        format!("{} `{}`", functions.join(" < "), line.unwrap_or_default())
    }

    fn place_of_block(&self, block: usize) -> String {
        let range = &self.graph.blocks[block].range;
        format!("{} instructions of {}", range.len(), self.place(range.start))
    }

    fn loops(&self, path: &Path) -> Vec<String> {
        let mut lines = Vec::new();
        for number in 0..self.tiles {
            if !self.graph.loops[number].blocks.is_subset(&self.graph.loops[self.tiles].blocks) {
                continue;
            }
            let times = path.loops.get(&number).copied().unwrap_or(0.0);
            let turning = &self.turnings[number];
            let text = match &turning.origin {
                Some(origin) => self.sources[origin.file].loops[origin.number].text.clone(),
                None => "?".to_owned(),
            };
            let blocks = &self.graph.loops[number].blocks;
            let issued = blocks.iter().map(|block| {
                path.blocks.get(block).copied().unwrap_or(0.0)
                    * self.graph.blocks[*block].range.len() as f64
            });
            let issued: f64 = issued.sum();
            let latch = self.graph.loops[number].latches[0];
            let functions: Vec<&str> =
                self.functions(self.graph.blocks[latch].range.end - 1).take(3).collect();
            let by = match turning.of_source {
                Some(turns) => format!("of {turns} by rule"),
                None => "NOT KNOWN, taken once".to_owned(),
            };
            lines.push(format!(
                "{issued:5.0} at {:x}, in {times} turns ({by}; {} at once): {} `{text}`",
                self.graph.blocks[self.graph.loops[number].head].range.start * 16,
                turning.at_once,
                functions.join(" < ")
            ));
        }
        lines.sort_by(|a, b| b.cmp(a));
        lines
    }

    fn two_sided(&self, path: &Path) -> Vec<String> {
        let mut sides: Vec<_> = path.two_sided.iter().filter(|side| side.more >= 4.0).collect();
        sides.sort_by(|a, b| b.more.total_cmp(&a.more));
        sides
            .iter()
            .map(|side| format!("{:5.0} more: {}", side.more, self.place(side.branch)))
            .collect()
    }
}

fn sorted(parts: BTreeMap<String, f64>) -> Parts {
    let mut parts: Parts = parts.into_iter().collect();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    parts
}

pub(super) fn print(row: &Row, count: &Count, all: bool, report: &Report) {
    report.line(&format!(
        "{} ({}): {:.0} instructions of a thread and {}, {:.1} per value",
        row.codec,
        row.kernel,
        count.total,
        match row {
            Row { whole: true, .. } => "page",
            Row { tiles: 2, .. } => "two tiles",
            _ => "tile",
        },
        count.total / values(row)
    ));
    let parts = |name: &str, parts: &Parts| {
        let texts: Vec<String> = parts.iter().map(|(name, n)| format!("{name} {n:.0}")).collect();
        report.line(&format!("  {name}: {}", texts.join(", ")));
    };
    parts("by verb", &count.verbs);
    let of_value = |(name, n): &(String, f64)| format!("{name} {:.2}", n / values(row));
    let texts: Vec<String> = count.pipes.iter().map(of_value).collect();
    report.line(&format!("  per value, by pipe: {}", texts.join(", ")));
    count.notes.iter().for_each(|note| report.line(&format!("  note: {note}")));
    if all {
        parts("by function", &count.functions);
        parts("by operation", &count.operations);
        count.loops.iter().for_each(|line| report.line(&format!("  loop {line}")));
        count.two_sided.iter().for_each(|line| report.line(&format!("  two sides, {line}")));
        count.blocks.iter().for_each(|line| report.line(&format!("  block {line}")));
    }
}

pub(super) fn json(row: &Row, count: &Count) -> Value {
    json!({
        "codec": row.codec,
        "kernel": row.kernel,
        "of_a_thread": count.total,
        "per_value": count.total / values(row),
        "verbs": count.verbs,
        "functions": count.functions,
        "operations": count.operations,
        "pipes": count.pipes,
        "loops": count.loops,
        "two_sided": count.two_sided,
        "notes": count.notes,
    })
}

#[cfg(test)]
mod tests {
    use super::super::listing::parse;
    use super::*;

    const SOURCE: &str = "\
KVD_DEVICE void absorb() {
    if (KVD_RARELY(is_odd)) {
        for (unsigned mine = 0; mine < units; mine++) {
            any(mine);
        }
        return;
    }
    add();
}
";

    /// Only what has the line of the rare loop leads to products; they may be gone around.
    const LISTING: &str = "\t.section\t.text.k,\"ax\"
\t//## File \"a.cu\", line 8
.L_1:
 /*0000*/ BAR.SYNC 0x0 ;
 /*0010*/ @P0 BRA `(.L_3) ;
\t//## File \"a.cu\", line 3
 /*0020*/ MOV R1, RZ ;
 /*0030*/ @P1 BRA `(.L_2) ;
\t//## File \"a.cu\", line 8
 /*0040*/ IMMA R1, R2, R3 ;
 /*0050*/ IMMA R1, R2, R3 ;
 /*0060*/ BRA `(.L_3) ;
.L_2:
\t//## File \"a.cu\", line 4
 /*0070*/ IMMA R1, R2, R3 ;
 /*0080*/ IMMA R1, R2, R3 ;
 /*0090*/ IMMA R1, R2, R3 ;
 /*00a0*/ IMMA R1, R2, R3 ;
.L_3:
\t//## File \"a.cu\", line 8
 /*00b0*/ @P2 BRA `(.L_1) ;
 /*00c0*/ EXIT ;
";

    const ROW: Row =
        Row { codec: "c", file: "a", kernel: "k", tiles: 1, whole: false, again: &[], rules: &[] };

    fn counted_as(listing: &str, row: &Row) -> Count {
        let listing = parse(listing);
        count(&listing, &listing.kernels[0], &[Source::new(SOURCE)], row).unwrap()
    }

    fn counted(listing: &str) -> Count {
        counted_as(listing, &ROW)
    }

    #[test]
    fn a_line_of_what_is_rare_does_not_hide_products() {
        let all = counted(LISTING);
        assert_eq!((all.total, all.notes), (8.0, Vec::new()));
        // Where more is rare the way to them is.
        let long = " /*0020*/ MOV R1, RZ ;\n /*0024*/ MOV R2, RZ ;\n";
        let all = counted(&LISTING.replace(" /*0020*/ MOV R1, RZ ;\n", long));
        assert_eq!((all.total, all.notes), (3.0, Vec::new()));
    }

    #[test]
    fn what_is_found_of_one_tile_is_counted_again() {
        let row = Row { again: &[REST], ..ROW };
        let again = counted_as(LISTING, &row);
        let pipes: Vec<_> = again.pipes.iter().map(|(pipe, times)| (&**pipe, *times)).collect();
        let wanted = [("control", 10.0), ("tensor", 4.0), ("integer", 2.0)];
        assert_eq!((again.total, &*pipes), (16.0, &wanted[..]));
        assert_eq!(again.notes, ["rest are found for one of the tiles, and counted twice"]);
    }
}

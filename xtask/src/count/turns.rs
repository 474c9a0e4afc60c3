//! How often a loop turns: by the loop of the source that it came from, and by how many turns of
//! that one the compiler made one.

use super::graph::{Graph, Loop};
use super::listing::{Chain, Frame, Kernel, Listing};
use super::marks::Rules;
use super::source::{Source, SourceLoop};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A loop of the source, inlined at `within`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Origin {
    pub(super) file: usize,
    /// Of the file's loops.
    pub(super) number: usize,
    within: Chain,
}

/// What is known of a kernel's loop.
#[derive(Clone, Debug)]
pub(super) struct Turning {
    pub(super) origin: Option<Origin>,
    /// Turns of the source's loop, none where no rule says so.
    pub(super) of_source: Option<f64>,
    /// Turns of the source's loop in one of this one.
    pub(super) at_once: f64,
    pub(super) turns: f64,
    /// Operations, by their lines, that show where its body stands.
    pub(super) marks: Marks,
}

/// A chain and an operation, and how often they stand together.
type Marks = BTreeMap<(usize, String), usize>;

/// Loads, stores, products: what no turn shares with another.
const MARKS: [&str; 8] = ["LD", "ST", "IMMA", "HMMA", "SHFL", "ATOM", "RED", "MUFU"];

pub(super) struct Turns<'a> {
    pub(super) kernel: &'a Kernel,
    pub(super) listing: &'a Listing,
    pub(super) sources: &'a [Source],
    pub(super) graph: &'a Graph,
}

impl Turns<'_> {
    /// Of all loops of the graph.
    pub(super) fn find(&self, rules: &[Rules]) -> Vec<Turning> {
        let all = self.graph.loops.iter().map(|known| self.turning(known, rules));
        let mut all: Vec<Turning> = all.collect();
        let mut of_origins: HashMap<Origin, Vec<usize>> = HashMap::new();
        for (number, turning) in all.iter().enumerate() {
            if let Some(origin) = &turning.origin {
                of_origins.entry(origin.clone()).or_default().push(number);
            }
        }
        for of_origin in of_origins.into_values() {
            let most = of_origin.iter().map(|number| all[*number].at_once).fold(1.0, f64::max);
            let length = |number: &usize| self.instructions(&self.graph.loops[*number]).count();
            let longest = of_origin.iter().filter(|number| all[**number].at_once >= most);
            let longest = longest.map(length).max().unwrap_or(0);
            for number in of_origin {
                // One that is about as long is a copy of it, of another tile, of which the marks
                // show less: no rest.
                if 4 * length(&number) >= 3 * longest {
                    all[number].at_once = most;
                }
                // What the loop that does several at once leaves is a part of a turn of it.
                let turning = &mut all[number];
                let is_rest = turning.at_once < most;
                turning.turns = if is_rest { 0.0 } else { turning.turns / turning.at_once };
            }
        }
        all
    }

    fn turning(&self, known: &Loop, rules: &[Rules]) -> Turning {
        let origin = self.origin(known);
        let of_source = origin.as_ref().and_then(|origin| {
            let mut turns = rules.iter().flat_map(|rules| rules.turns);
            turns.find(|(text, _)| self.is_meant(origin, text)).map(|(_, turns)| *turns)
        });
        let marks = origin.as_ref().map(|origin| self.marks(known, origin)).unwrap_or_default();
        // The body stands in the loop as often as the mark that does least often.
        let least = marks.values().min().copied().unwrap_or(1);
        let at_once = f64::from(u32::try_from(least).unwrap_or(1));
        Turning { origin, of_source, at_once, turns: of_source.unwrap_or(1.0), marks }
    }

    /// Whether a rule's text is in a loop's header: `text`, or `text @ function` where it is
    /// inlined.
    fn is_meant(&self, origin: &Origin, rule: &str) -> bool {
        let (text, caller) = rule.split_once(" @ ").unwrap_or((rule, ""));
        let mut callers = origin.within.iter().filter_map(|frame| {
            self.sources[frame.file].function(frame.line).map(|function| function.name.as_str())
        });
        self.source_loop(origin).text.contains(text)
            && (caller.is_empty() || callers.any(|name| name == caller))
    }

    /// What an instruction is known by.
    fn mark(&self, at: usize) -> (usize, String) {
        let instruction = &self.kernel.instructions[at];
        (instruction.chain, instruction.opcode.clone())
    }

    pub(super) fn source_loop(&self, origin: &Origin) -> &SourceLoop {
        &self.sources[origin.file].loops[origin.number]
    }

    /// Loops of the source that a chain is in, each with what it is inlined at.
    fn around(&self, chain: &Chain) -> Vec<Origin> {
        let mut around = Vec::new();
        for (depth, frame) in chain.iter().enumerate() {
            let loops = self.sources[frame.file].loops.iter().enumerate();
            for (number, _) in loops.filter(|(_, known)| known.lines.contains(&frame.line)) {
                let within = chain[depth + 1..].to_vec();
                around.push(Origin { file: frame.file, number, within });
            }
        }
        around
    }

    /// Whether an instruction came from a loop of the source.
    fn is_of(&self, chain: &Chain, origin: &Origin) -> bool {
        let Some(depth) = chain.len().checked_sub(origin.within.len() + 1) else { return false };
        let Frame { file, line } = chain[depth];
        file == origin.file
            && chain[depth + 1..] == origin.within
            && self.source_loop(origin).lines.contains(&line)
    }

    /// Whether most of a block came from the body of a loop, and shows it by a mark.
    pub(super) fn is_body(&self, block: usize, turning: &Turning) -> bool {
        let Some(origin) = &turning.origin else { return false };
        let range = &self.graph.blocks[block].range;
        let header = &self.source_loop(origin).header;
        let is_of_body = |at: &usize| {
            let chain = self.chain(*at);
            let frame = chain.iter().rev().nth(origin.within.len());
            self.is_of(chain, origin) && frame.is_some_and(|frame| !header.contains(&frame.line))
        };
        2 * range.clone().filter(is_of_body).count() > range.len()
            && range.clone().any(|at| turning.marks.contains_key(&self.mark(at)))
    }

    fn chain(&self, at: usize) -> &Chain {
        &self.listing.chains[self.kernel.instructions[at].chain]
    }

    fn instructions(&self, known: &Loop) -> impl Iterator<Item = usize> {
        known.blocks.iter().flat_map(|block| self.graph.blocks[*block].range.clone())
    }

    /// The loop of the source whose header the way back is of, or else the smallest that nearly all
    /// instructions are of.
    fn origin(&self, known: &Loop) -> Option<Origin> {
        let mut support: HashMap<Origin, usize> = HashMap::new();
        let mut count = 0;
        for at in self.instructions(known) {
            let chain = self.chain(at);
            count += usize::from(!chain.is_empty());
            for origin in self.around(chain).into_iter().collect::<HashSet<_>>() {
                *support.entry(origin).or_default() += 1;
            }
        }
        let size = |origin: &Origin| {
            let lines = &self.source_loop(origin).lines;
            (lines.end() - lines.start(), origin.file, origin.number)
        };
        let back = known.latches.first().map(|latch| self.graph.blocks[*latch].range.end - 1)?;
        let by_header = self.around(self.chain(back)).into_iter().filter(|origin| {
            let frame = self.chain(back).iter().rev().nth(origin.within.len());
            frame.is_some_and(|frame| self.source_loop(origin).header.contains(&frame.line))
        });
        let enough = |origin: &Origin, part| support[origin] * 10 >= count * part;
        let by_header = by_header.filter(|origin| enough(origin, 5));
        let best = by_header.max_by_key(|origin| (support[origin], size(origin)));
        let nearly_all = || support.keys().filter(|origin| enough(origin, 9));
        best.or_else(|| nearly_all().min_by_key(|origin| size(origin)).cloned())
    }

    fn marks(&self, known: &Loop, origin: &Origin) -> Marks {
        let mut marks = Marks::new();
        let inner = self
            .graph
            .loops
            .iter()
            .filter(|inner| inner.head != known.head && inner.blocks.is_subset(&known.blocks));
        let inner: HashSet<usize> = inner.flat_map(|inner| inner.blocks.iter().copied()).collect();
        let blocks = known.blocks.iter().filter(|block| !inner.contains(*block));
        for at in blocks.flat_map(|block| self.graph.blocks[*block].range.clone()) {
            let instruction = &self.kernel.instructions[at];
            // A load of nothing is the assembler's own.
            let is_mark = MARKS.iter().any(|mark| instruction.opcode.starts_with(mark))
                && !instruction.operands.starts_with("RZ");
            if is_mark && self.is_of(self.chain(at), origin) {
                *marks.entry(self.mark(at)).or_default() += 1;
            }
        }
        marks
    }
}

#[cfg(test)]
mod tests {
    use super::super::listing::parse;
    use super::*;

    const SOURCE: &str = "\
KVD_DEVICE void copy(unsigned n) {
    for (unsigned at = 0; at < n; at++) {
        to[at] = from[at];
    }
}
KVD_DEVICE void both() {
    copy(5);
}
";

    /// A loop of two copies at once, one of one for the rest, and a copy before both.
    const LISTING: &str = "\t.section\t.text.k,\"ax\"
\t//## File \"a.cu\", line 3 inlined at \"a.cu\", line 7
\t//## File \"a.cu\", line 7
 /*0000*/ LDS R1, [R2] ;
 /*0010*/ @P0 BRA `(.L_1) ;
.L_1:
 /*0020*/ LDS R1, [R2] ;
 /*0030*/ LDS R3, [R2+0x4] ;
\t//## File \"a.cu\", line 2 inlined at \"a.cu\", line 7
\t//## File \"a.cu\", line 7
 /*0040*/ @P0 BRA `(.L_1) ;
.L_2:
\t//## File \"a.cu\", line 3 inlined at \"a.cu\", line 7
\t//## File \"a.cu\", line 7
 /*0050*/ LDS R1, [R2] ;
\t//## File \"a.cu\", line 2 inlined at \"a.cu\", line 7
\t//## File \"a.cu\", line 7
 /*0060*/ @P0 BRA `(.L_2) ;
 /*0070*/ EXIT ;
";

    /// Two loops of two copies at once, of two tiles; the second shows less of it.
    const TWO_TILES: &str = "\t.section\t.text.k,\"ax\"
\t//## File \"a.cu\", line 3 inlined at \"a.cu\", line 7
\t//## File \"a.cu\", line 7
 /*0000*/ LDS R1, [R2] ;
 /*0010*/ @P0 BRA `(.L_1) ;
.L_1:
 /*0020*/ LDS R1, [R2] ;
 /*0030*/ LDS R3, [R2+0x4] ;
 /*0040*/ STS [R2], R1 ;
 /*0050*/ STS [R2+0x4], R3 ;
\t//## File \"a.cu\", line 2 inlined at \"a.cu\", line 7
\t//## File \"a.cu\", line 7
 /*0060*/ @P0 BRA `(.L_1) ;
.L_2:
\t//## File \"a.cu\", line 3 inlined at \"a.cu\", line 7
\t//## File \"a.cu\", line 7
 /*0070*/ LDS R1, [R2] ;
 /*0080*/ LDS R3, [R2+0x4] ;
 /*0090*/ STS.64 [R2], R1 ;
\t//## File \"a.cu\", line 2 inlined at \"a.cu\", line 7
\t//## File \"a.cu\", line 7
 /*00a0*/ @P0 BRA `(.L_2) ;
 /*00b0*/ EXIT ;
";

    fn turnings(listing: &str, text: &'static str) -> Vec<Turning> {
        let listing = parse(listing);
        let kernel = &listing.kernels[0];
        let (graph, sources) = (Graph::of(kernel), [Source::new(SOURCE)]);
        let turns = Turns { kernel, listing: &listing, sources: &sources, graph: &graph };
        let by_text: &'static [_] = Box::leak(Box::new([(text, 5.0)]));
        let rules = Rules { never: &[], always: &[], turns: by_text, unrolled: &[], skipped: &[] };
        let mut all = turns.find(&[rules]);
        assert!(turns.is_body(0, &all[0]), "a copy is seen to be one");
        all.sort_by(|a, b| b.at_once.total_cmp(&a.at_once));
        all
    }

    #[test]
    fn an_unrolled_loop_turns_as_often_as_the_sources() {
        let of = |text| {
            let all = turnings(LISTING, text);
            all.iter().map(|t| (t.at_once, t.turns)).collect::<Vec<_>>()
        };
        assert_eq!(of("at < n; @ both"), [(2.0, 2.5), (1.0, 0.0)]);
        assert_eq!(of("at < n; @ other"), [(2.0, 0.5), (1.0, 0.0)]);
        assert_eq!(turnings(LISTING, "at < n;")[0].of_source, Some(5.0));
    }

    #[test]
    fn a_loop_of_another_tile_is_no_rest() {
        let all = turnings(TWO_TILES, "at < n; @ both");
        assert_eq!(all.iter().map(|t| t.turns).collect::<Vec<_>>(), [2.5; 2]);
    }
}

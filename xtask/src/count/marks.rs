//! Which lines a full tile of a long sequence does not execute: those in the braces of
//! `if (KVD_RARELY(...))`, those that the rules of a codec name by their text, and what another
//! warp does.

use super::listing::Frame;
use super::source::Source;
use std::collections::HashSet;
use std::ops::RangeInclusive;

/// What is known of a codec's tiles and is not in the kernel's source, by the source's text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// Bodies of conditions, whole loops, functions and other statements that are not executed.
    pub(super) never: &'static [&'static str],
    /// Conditions that are true.
    pub(super) always: &'static [&'static str],
    /// Turns of loops whose header holds a text.
    pub(super) turns: &'static [(&'static str, f64)],
    /// Loops whose turns are all unrolled and left early: an operation that every turn has once,
    /// and how many of its copies are executed.
    pub(super) unrolled: &'static [(&'static str, &'static str, usize)],
    /// Unrolled loops some of whose turns do nothing: an operation that every turn has once, and
    /// which of the turns are executed.
    pub(super) skipped: &'static [(&'static str, &'static str, &'static [bool])],
}

/// Marks what is promised to be rare.
const RARELY: &str = "KVD_RARELY(";

type Lines = RangeInclusive<usize>;

/// Lines that are not executed, and texts of rules that stand nowhere.
pub(super) fn left_out(sources: &[Source], rules: &[Rules]) -> (HashSet<Frame>, Vec<&'static str>) {
    let mut out = HashSet::new();
    let mut missing = Vec::new();
    let of_all = rules.len();
    let mut add = |file, lines: Lines| out.extend(lines.map(|line| Frame { file, line }));
    for (file, source) in sources.iter().enumerate() {
        rare(source).into_iter().for_each(|lines| add(file, lines));
    }
    for (number, rules) in rules.iter().enumerate() {
        let never = rules.never.iter().map(|text| (text, false));
        for (text, is_true) in never.chain(rules.always.iter().map(|text| (text, true))) {
            let mut found = false;
            for (file, source) in sources.iter().enumerate() {
                for at in source.find(text) {
                    found = true;
                    let lines =
                        if is_true { instead(source, at) } else { of_statement(source, at) };
                    lines.into_iter().for_each(|lines| add(file, lines));
                }
            }
            // The last rules are those of many kernels.
            if !found && (number == 0 || number + 1 < of_all) {
                missing.push(*text);
            }
        }
    }
    (out, missing)
}

/// Lines that only other warps execute, where units have so many query rows.
pub(super) fn of_others(sources: &[Source], warp: usize, rows: usize) -> HashSet<Frame> {
    let lines = sources.iter().enumerate().flat_map(|(file, source)| {
        others(source, warp, rows).into_iter().map(move |lines| (file, lines))
    });
    lines.flat_map(|(file, lines)| lines.map(move |line| Frame { file, line })).collect()
}

fn rare(source: &Source) -> Vec<Lines> {
    let conditions = source.find(RARELY).into_iter();
    conditions.filter_map(|at| body_lines(source, source.after_condition(at)?)).collect()
}

/// The lines of a statement without what decides whether it is executed.
fn of_statement(source: &Source, at: usize) -> Vec<Lines> {
    if source.starts_with(at, "if (") || source.starts_with(at, "if constexpr (") {
        let end = source.condition_of(at);
        return end.and_then(|end| body_lines(source, end + 1)).into_iter().collect();
    }
    let end = match source.body(at) {
        Ok(brace) => source.close(brace).unwrap_or(brace),
        Err(end) => end,
    };
    vec![source.line_of(at)..=source.line_of(end)]
}

/// What is executed where a condition is false.
fn instead(source: &Source, at: usize) -> Vec<Lines> {
    let mut lines = Vec::new();
    let Some(condition) = source.condition_of(at) else { return lines };
    let (last, end) = match source.body(condition + 1) {
        Ok(brace) => {
            let close = source.close(brace).unwrap_or(brace);
            (source.text(brace + 1, close), close)
        }
        Err(end) => (source.text(condition + 1, end + 1), end),
    };
    let last = last.trim_end().trim_end_matches(';');
    let last = last.rsplit([';', '{', '}']).next().unwrap_or_default().trim_start();
    let after = source.skip_space(end + 1);
    if source.starts_with(after, "else") {
        lines.extend(body_lines(source, after + "else".len()));
    }
    let leaves = ["return", "continue", "break"].iter().any(|word| last.starts_with(word));
    if leaves && let Some(around) = source.around(at) {
        let (from, to) = (source.line_of(end) + 1, source.line_of(*around.end()));
        if from < to {
            lines.push(from..=to - 1);
        }
    }
    lines
}

/// The lines of a body that begins at or after `at`, in braces or one statement; none where it
/// shares its line with the condition.
fn body_lines(source: &Source, at: usize) -> Option<Lines> {
    let start = source.skip_space(at);
    let (from, to) = match source.body(start) {
        Ok(brace) if brace == start => {
            let close = source.close(brace)?;
            let last = source.line_of(close);
            // What follows on the line of a closing brace is another branch.
            let is_alone = source.line(last) == "}";
            (source.line_of(brace) + 1, if is_alone { last } else { last - 1 })
        }
        Ok(brace) => (source.line_of(start), source.line_of(source.close(brace)?)),
        Err(end) => (source.line_of(start), source.line_of(end)),
    };
    let of_condition = source.line_of(at.saturating_sub(1));
    (from > of_condition && from <= to).then_some(from..=to)
}

/// What only other warps do.
fn others(source: &Source, warp: usize, rows: usize) -> Vec<Lines> {
    let mut lines = Vec::new();
    for at in source.find("if (") {
        let Some(end) = source.condition_of(at) else { continue };
        let condition = source.text(at + "if (".len(), end);
        let of_parts: Vec<_> = condition.split("&&").map(|part| holds(part, warp, rows)).collect();
        if of_parts.contains(&Some(false)) {
            lines.extend(body_lines(source, end + 1));
        } else if of_parts.iter().all(|part| *part == Some(true))
            && ["warp_index()", "row_of("].iter().any(|of_warp| condition.contains(of_warp))
        {
            lines.extend(instead(source, at));
        }
    }
    lines
}

/// Whether a condition holds for some lane of a warp; none where that is not asked by numbers. Of
/// one query row the first warp has all, and of others every warp has as many.
fn holds(condition: &str, warp: usize, rows: usize) -> Option<bool> {
    let words: Vec<&str> = condition.split_whitespace().collect();
    let [index, relation, number] = words[..] else { return None };
    let number: usize = match number {
        "ROWS" if rows == 1 => rows,
        "WARP_LANES" => super::WARP_LANES,
        number => number.trim_end_matches('u').parse().ok()?,
    };
    let (first, last) = match index {
        "warp_index()" | "row" | "row_of(own)" | "Mine::row_of(own)" => (warp, warp),
        "thread_index()" => (warp * super::WARP_LANES, (warp + 1) * super::WARP_LANES - 1),
        _ => return None,
    };
    Some(match relation {
        "==" => (first..=last).contains(&number),
        "!=" => first != number || last != number,
        "<" => first < number,
        ">=" => last >= number,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
KVD_DEVICE void f() {
    if (KVD_RARELY(a && b) || c) {
        rare();
    } else {
        usual();
    }
    if (warp_index() == 1 && d) {
        one();
    }
    if (e) {
        return g();
    }
    h();
    for (unsigned i = 0; i < n; i++) {
        i();
    }
    if (KVD_RARELY(j)) return;
}
";

    fn lines(rules: Rules, warp: usize) -> Vec<usize> {
        let sources = [Source::new(TEXT)];
        let (mut frames, missing) = left_out(&sources, &[rules]);
        frames.extend(of_others(&sources, warp, 4));
        assert_eq!(missing, ["nowhere"]);
        let mut lines: Vec<usize> = frames.into_iter().map(|frame| frame.line).collect();
        lines.sort_unstable();
        lines
    }

    #[test]
    fn the_first_warp_has_the_one_query_row() {
        for condition in ["row < ROWS", "Mine::row_of(own) < ROWS"] {
            let of = |rows| [0, 1].map(|warp| holds(condition, warp, rows));
            assert_eq!(of(1), [Some(true), Some(false)], "{condition}");
            assert_eq!(of(4), [None; 2], "{condition}");
        }
        assert_eq!(
            [0, 1].map(|warp| holds("row_of(own) >= ROWS", warp, 1)),
            [Some(false), Some(true)]
        );
    }

    #[test]
    fn lines_are_left_out_by_mark_text_and_warp() {
        let rules =
            Rules { never: &["nowhere"], always: &[], turns: &[], unrolled: &[], skipped: &[] };
        assert_eq!(lines(rules, 1), [3]);
        assert_eq!(lines(rules, 0), [3, 8, 9]);
        let rules = Rules { never: &["if (e)", "for (unsigned i = 0;", "nowhere"], ..rules };
        assert_eq!(lines(rules, 1), [3, 11, 12, 14, 15, 16]);
        let rules = Rules {
            never: &["nowhere"],
            always: &["if (e)"],
            turns: &[],
            unrolled: &[],
            skipped: &[],
        };
        assert_eq!(lines(rules, 1), [3, 13, 14, 15, 16, 17]);
    }
}

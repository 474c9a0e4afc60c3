//! What the counter reads of a source file: which function a line is of, the loops, and the bodies
//! of statements. By braces and words alone; no C++ is parsed.

use std::ops::RangeInclusive;

/// A function, or a lambda with a name, and its lines from 1.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Function {
    /// With its struct's name before it.
    pub(super) name: String,
    pub(super) lines: RangeInclusive<usize>,
}

/// A `for` or `while`: its header, from which it is known, and its lines with the header's.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SourceLoop {
    pub(super) text: String,
    pub(super) header: RangeInclusive<usize>,
    pub(super) lines: RangeInclusive<usize>,
}

#[derive(Debug, Default)]
pub(super) struct Source {
    /// Without comments and preprocessor's lines; as long as the file.
    code: Vec<u8>,
    /// Where lines begin.
    starts: Vec<usize>,
    pub(super) functions: Vec<Function>,
    pub(super) loops: Vec<SourceLoop>,
}

/// What a brace opens, and where.
struct Open {
    structure: Option<String>,
    function: Option<String>,
    line: usize,
}

impl Source {
    pub(super) fn new(text: &str) -> Self {
        let code = strip(text);
        let mut starts = vec![0];
        starts.extend(code.iter().enumerate().filter(|(_, c)| **c == b'\n').map(|(at, _)| at + 1));
        let mut source = Self { code, starts, ..Self::default() };
        source.find_functions();
        source.find_loops();
        source
    }

    pub(super) fn line_of(&self, at: usize) -> usize {
        self.starts.partition_point(|start| *start <= at)
    }

    /// A line as it stands, without a comment.
    pub(super) fn line(&self, line: usize) -> &str {
        let from = self.starts.get(line.wrapping_sub(1)).copied().unwrap_or(self.code.len());
        let to = self.starts.get(line).map_or(self.code.len(), |end| end - 1);
        std::str::from_utf8(&self.code[from..to.max(from)]).unwrap_or_default().trim()
    }

    /// The innermost function of a line.
    pub(super) fn function(&self, line: usize) -> Option<&Function> {
        let of_line = self.functions.iter().filter(|function| function.lines.contains(&line));
        of_line.min_by_key(|function| function.lines.end() - function.lines.start())
    }

    /// Places of a text; line breaks and indentation count as one space.
    pub(super) fn find(&self, text: &str) -> Vec<usize> {
        let wanted: Vec<&str> = text.split_whitespace().collect();
        let Some(first) = wanted.first() else { return Vec::new() };
        let starts =
            (0..self.code.len()).filter(|at| self.code[*at..].starts_with(first.as_bytes()));
        starts.filter(|at| self.holds(*at, &wanted)).collect()
    }

    fn holds(&self, mut at: usize, words: &[&str]) -> bool {
        words.iter().enumerate().all(|(number, word)| {
            let before = at;
            at = self.skip_space(at);
            let is_here = self.code[at..].starts_with(word.as_bytes());
            let is_apart = number == 0 || at > before;
            at += word.len();
            is_here && is_apart
        })
    }

    pub(super) fn skip_space(&self, mut at: usize) -> usize {
        while self.code.get(at).is_some_and(u8::is_ascii_whitespace) {
            at += 1;
        }
        at
    }

    pub(super) fn starts_with(&self, at: usize, text: &str) -> bool {
        self.code.get(at..).is_some_and(|rest| rest.starts_with(text.as_bytes()))
    }

    /// The text of a range.
    pub(super) fn text(&self, from: usize, to: usize) -> &str {
        std::str::from_utf8(&self.code[from..to.max(from)]).unwrap_or_default()
    }

    /// Where the parenthesis or brace at `at` is closed.
    pub(super) fn close(&self, at: usize) -> Option<usize> {
        let mut depth = 0_usize;
        for (place, c) in self.code.iter().enumerate().skip(at) {
            match c {
                b'(' | b'{' | b'[' => depth += 1,
                b')' | b'}' | b']' => {
                    depth = depth.checked_sub(1)?;
                    if depth == 0 {
                        return Some(place);
                    }
                }
                _ => {}
            }
        }
        None
    }

    /// Of a statement that begins at or before `at`: where its brace is, or, as the error, its end.
    pub(super) fn body(&self, at: usize) -> Result<usize, usize> {
        let mut place = at;
        while let Some(c) = self.code.get(place) {
            match c {
                b'{' => return Ok(place),
                b';' | b'}' => return Err(place),
                b'(' => place = self.close(place).unwrap_or(place),
                _ => {}
            }
            place += 1;
        }
        Err(self.code.len())
    }

    /// Where the condition of the `if` at or before `at` is closed.
    pub(super) fn condition_of(&self, at: usize) -> Option<usize> {
        let open = (at..self.code.len()).find(|place| self.code[*place] == b'(')?;
        self.close(open)
    }

    /// Behind the condition that `at` is within.
    pub(super) fn after_condition(&self, at: usize) -> Option<usize> {
        let mut depth = 0_usize;
        for place in at..self.code.len() {
            match self.code[place] {
                b'(' => depth += 1,
                b')' if depth == 0 => return Some(place + 1),
                b')' => depth -= 1,
                b';' | b'{' => return None,
                _ => {}
            }
        }
        None
    }

    /// The brace that is open at `at`, and where it is closed.
    pub(super) fn around(&self, at: usize) -> Option<RangeInclusive<usize>> {
        let mut depth = 0_usize;
        for place in (0..at).rev() {
            match self.code[place] {
                b'}' => depth += 1,
                b'{' if depth == 0 => return Some(place..=self.close(place)?),
                b'{' => depth -= 1,
                _ => {}
            }
        }
        None
    }

    fn find_functions(&mut self) {
        let mut open: Vec<Open> = Vec::new();
        let mut from = 0;
        let mut depth = 0_usize;
        for at in 0..self.code.len() {
            match self.code[at] {
                b'(' => depth += 1,
                b')' => depth = depth.saturating_sub(1),
                b'{' => {
                    // A parameter's default or a lambda in an argument list has more before it.
                    let header = self.text(from, at);
                    let line = self.line_of(self.skip_space(from));
                    open.push(Open {
                        structure: structure_of(header),
                        function: function_of(header),
                        line,
                    });
                    from = at + 1;
                }
                b'}' => {
                    if let Some(closed) = open.pop()
                        && let Some(name) = closed.function
                    {
                        let within = open.iter().rev().find_map(|above| above.structure.as_ref());
                        let name =
                            within.map_or(name.clone(), |within| format!("{within}::{name}"));
                        let lines = closed.line..=self.line_of(at);
                        self.functions.push(Function { name, lines });
                    }
                    from = at + 1;
                }
                b';' if depth == 0 || open.last().is_some_and(|last| last.function.is_some()) => {
                    from = at + 1;
                }
                _ => {}
            }
        }
    }

    fn find_loops(&mut self) {
        let mut loops = Vec::new();
        for word in ["for (", "while ("] {
            for at in self.find(word) {
                let parenthesis = at + word.len() - 1;
                let Some(end) = self.close(parenthesis) else { continue };
                let header = self.line_of(at)..=self.line_of(end);
                let last = match self.body(end + 1) {
                    Ok(brace) => self.close(brace).unwrap_or(brace),
                    Err(end) => end,
                };
                let words: Vec<&str> = self.text(at, end + 1).split_whitespace().collect();
                let lines = *header.start()..=self.line_of(last);
                loops.push(SourceLoop { text: words.join(" "), header, lines });
            }
        }
        self.loops = loops;
    }
}

/// The name of what a header defines, if that is a function.
fn function_of(header: &str) -> Option<String> {
    let (_, rest) = header.rsplit_once("KVD_DEVICE").unwrap_or(("", header));
    if rest.len() == header.len() {
        let (name, captures) = header.split_once("= [")?;
        let name = name.trim_end().rsplit(|c: char| c.is_whitespace()).next()?;
        return captures.contains("](").then(|| name.to_owned());
    }
    let before = rest.split('(').next()?.trim_end();
    let name = before.rsplit(|c: char| !(c.is_alphanumeric() || c == '_')).next()?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// The name of what a header defines, if that is a struct; of a specialization its whole name.
fn structure_of(header: &str) -> Option<String> {
    let (_, rest) = header.rsplit_once("struct ")?;
    let rest = match rest.strip_prefix("alignas(") {
        Some(rest) => rest.split_once(')')?.1,
        None => rest,
    };
    let name = rest.trim().split(['<', ':', ' ']).next()?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// The text with spaces for comments, strings' contents and preprocessor's lines.
fn strip(text: &str) -> Vec<u8> {
    let mut code = Vec::with_capacity(text.len());
    let mut continues = false;
    for line in text.lines() {
        let is_directive = continues || line.trim_start().starts_with('#');
        continues = is_directive && line.ends_with('\\');
        let kept = if is_directive { 0 } else { line.find("//").unwrap_or(line.len()) };
        let mut quoted = false;
        for (at, c) in line.bytes().enumerate() {
            let is_quote = c == b'"';
            quoted ^= is_quote;
            let is_code = at < kept && c.is_ascii() && (!quoted || is_quote);
            code.push(if is_code { c } else { b' ' });
        }
        code.push(b'\n');
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
#define KVD_X(a) \\
    struct { a }
// A comment {
namespace kvd {
template <class Side, int ROWS>
struct Sums<Tensor<Side>, ROWS> {
    KVD_DEVICE Sums(const Unit& unit)
        : unit(unit_of(0, BITS)) {
        clear();
    }
    KVD_DEVICE static unsigned first(unsigned block) { return block; }
};
KVD_DEVICE void attend(uint8_t* memory) {
    const auto start = [&](unsigned buffer) {
        Place next = {nullptr, 0};
        for (unsigned at = 0;
             at < 4; at++) {
            stage();
        }
    };
    each(codes, [&](unsigned step) { use(step); });
    for (;;) start(0);
}
}
";

    #[test]
    fn lines_are_of_functions() {
        let source = Source::new(TEXT);
        let name = |line| source.function(line).map(|function| function.name.as_str());
        assert_eq!([name(1), name(4), name(6)], [None; 3]);
        assert_eq!([name(7), name(9)], [Some("Sums::Sums"); 2]);
        assert_eq!(name(11), Some("Sums::first"));
        assert_eq!([name(13), name(21), name(22)], [Some("attend"); 3]);
        assert_eq!([name(14), name(16), name(20)], [Some("start"); 3]);
    }

    #[test]
    fn loops_have_headers_and_bodies() {
        let source = Source::new(TEXT);
        let [first, second] = &source.loops[..] else { panic!("{:?}", source.loops) };
        assert_eq!(first.text, "for (unsigned at = 0; at < 4; at++)");
        assert_eq!((&first.header, &first.lines), (&(16..=17), &(16..=19)));
        assert_eq!((&second.header, &second.lines), (&(22..=22), &(22..=22)));
        assert_eq!(source.find("for (unsigned at = 0; at < 4;").len(), 1);
        assert_eq!(source.find("for (unsigned at = 0; at < 5;").len(), 0);
    }
}

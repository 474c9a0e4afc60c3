//! The text form of a codec: `k=smooth+hadamard/vq(d=4,b=8); v=vq(d=4,b=8); recent=128`.
//!
//! ```text
//! codec     = item *( ";" item )                 (`resolve` also takes a preset as the first)
//! item      = "k=" side | "v=" side | "sink=" n | "recent=" n | bound | override
//! bound     = ( "k" | "v" ) ".bound=" x
//! override  = ( "k" | "v" ) "[" where *( "," where ) "]=" side
//! where     = ( "layer=" | "head=" ) n [ "-" n ]
//! side      = [ transform *( "+" transform ) "/" ] quantizer [ ( "/" | "+" ) "huffman" ]
//! transform = a name of `Transform`, "rotate" with or without "(seed=" n ")"
//! quantizer = "raw" | "f32" | "f16" | "bf16" | "fp8"
//!           | "uniform(" ( "b=" n | "rel=" x ) ",axis=" axis *( "," more of `UniformSpec` ) ")"
//!           | "polar(a=" n ",r=" n [ ",g=" n ] ")" | "lloyd(b=" n ")"
//!           | "vq(d=" n ",b=" n [ ",stages=" n ] [ ",scope=" scope ] ")"
//!           | "grid(rate=" x ")" | "bitalloc(b=" x ")"
//! axis      = "channel" | "token" | "block"
//! mode      = "asym" | "sym" | "hybrid"
//! scope     = "model" | "layer" | "head" | "group"
//! ```
//! Arguments stand in any order; spaces, line ends and comments from `#` to the end of a line are
//! allowed between tokens.

use crate::{CodecSpec, EntropyCoding, Quantizer, SideSpec, SpecError, SpecOverride, Transform};
use kvd_core::Side;
use std::ops::RangeInclusive;
use std::str::FromStr;

pub(crate) type ParseResult<T> = Result<T, SpecError>;

/// Names as an error lists them: `raw, f32 or vq()`.
fn join_names(names: &[&str]) -> String {
    match names {
        [others @ .., last] if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => names.concat(),
    }
}

impl FromStr for CodecSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let mut cursor = SpecCursor::new(text);
        let items = SpecItems::read_items(&mut cursor)?;
        let Some(key) = items.key else {
            return cursor.fail_at(cursor.at, "the key side k= is missing");
        };
        let Some(value) = items.value else {
            return cursor.fail_at(cursor.at, "the value side v= is missing");
        };
        let (sink, recent) = (items.sink.unwrap_or(0), items.recent.unwrap_or(0));
        let SpecItems { overrides, bounds, .. } = items;
        Ok(Self { key, value, sink, recent, overrides, bounds })
    }
}

/// The first word of a text, where a preset's name may stand.
pub(crate) struct FirstWord<'a> {
    /// Letters, digits and `-+.`; empty where the text holds nothing or begins otherwise.
    pub(crate) word: &'a str,
    /// Characters before it.
    pub(crate) position: usize,
    /// Byte offset of what follows it, spaces and comments skipped.
    pub(crate) end: usize,
    /// Characters before that.
    pub(crate) after: usize,
    /// The character at `end`; none at the end of the text.
    pub(crate) next: Option<char>,
}

impl FirstWord<'_> {
    /// Skips spaces, comments and a byte-order mark before it.
    pub(crate) fn read_word(text: &str) -> FirstWord<'_> {
        let mut cursor = SpecCursor::new(text);
        cursor.peek_char();
        let (start, rest) = (cursor.at, &text[cursor.at..]);
        let is_word = |c: char| c.is_ascii_alphanumeric() || "-+.".contains(c);
        let word = &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())];
        cursor.at += word.len();
        let next = cursor.peek_char();
        let [position, after] = [start, cursor.at].map(|at| cursor.char_position(at));
        FirstWord { word, position, end: cursor.at, after, next }
    }
}

/// Whether nothing but spaces and comments follows from byte `at` on.
pub(crate) fn is_blank(text: &str, at: usize) -> bool {
    SpecCursor { text, at }.peek_char().is_none()
}

/// `base` with what the items of `text` from byte `at` on say in its place; overrides are added.
pub(crate) fn parse_over(base: CodecSpec, text: &str, at: usize) -> ParseResult<CodecSpec> {
    let mut cursor = SpecCursor { text, at };
    if cursor.peek_char().is_none() {
        return Ok(base);
    }
    let items = SpecItems::read_items(&mut cursor)?;
    let [k, v] = [0, 1].map(|side| items.bounds[side].or(base.bounds[side]));
    Ok(CodecSpec {
        key: items.key.unwrap_or(base.key),
        value: items.value.unwrap_or(base.value),
        sink: items.sink.unwrap_or(base.sink),
        recent: items.recent.unwrap_or(base.recent),
        overrides: [base.overrides, items.overrides].concat(),
        bounds: [k, v],
    })
}

/// The parsed items of a spec text.
#[derive(Default)]
struct SpecItems {
    key: Option<SideSpec>,
    value: Option<SideSpec>,
    sink: Option<u32>,
    recent: Option<u32>,
    overrides: Vec<SpecOverride>,
    bounds: [Option<f32>; 2],
}

impl SpecItems {
    /// All items up to the end of the text; one at least.
    fn read_items(cursor: &mut SpecCursor<'_>) -> ParseResult<Self> {
        let mut items = Self::default();
        loop {
            items.read_item(cursor)?;
            if !cursor.take_char(';') || cursor.peek_char().is_none() {
                break;
            }
        }
        if cursor.peek_char().is_some() {
            return cursor.fail_at(cursor.at, "expected ';' or the end");
        }
        Ok(items)
    }

    fn read_item(&mut self, cursor: &mut SpecCursor<'_>) -> ParseResult<()> {
        let (start, name) = cursor.parse_word("k, v, sink or recent")?;
        let side = [Side::Key, Side::Value].into_iter().find(|side| side.name() == name);
        if let (Some(side), true) = (side, cursor.take_char('[')) {
            self.overrides.push(cursor.parse_override(side)?);
            return Ok(());
        }
        cursor.expect_char('=')?;
        let fresh = match name {
            "k" => self.key.replace(cursor.parse_side()?).is_none(),
            "v" => self.value.replace(cursor.parse_side()?).is_none(),
            "sink" => self.sink.replace(cursor.parse_number("tokens")?).is_none(),
            "recent" => self.recent.replace(cursor.parse_number("tokens")?).is_none(),
            "k.bound" => self.bounds[0].replace(cursor.parse_bound()?).is_none(),
            "v.bound" => self.bounds[1].replace(cursor.parse_bound()?).is_none(),
            _ => {
                let known = "k, v, sink, recent, k.bound or v.bound";
                return cursor.fail_at(start, format!("{name:?} is not {known}"));
            }
        };
        if fresh { Ok(()) } else { cursor.fail_at(start, format!("{name} is given twice")) }
    }
}

/// An argument in parentheses: where it stands, its name and its text.
pub(crate) struct Argument<'a> {
    pub(crate) start: usize,
    pub(crate) name: &'a str,
    pub(crate) value_start: usize,
    pub(crate) value: &'a str,
}

/// The name of a quantizer, and where it stands.
#[derive(Clone, Copy)]
pub(crate) struct QuantizerWord<'a> {
    pub(crate) start: usize,
    pub(crate) name: &'a str,
}

/// The words that were expected: their kind and a list.
#[derive(Clone, Copy)]
struct ExpectedWords<'a> {
    what: &'a str,
    known: &'a str,
}

/// The only argument of a quantizer, a number.
#[derive(Clone, Copy)]
pub(crate) struct SingleArgument<'a> {
    pub(crate) argument: &'a str,
    /// The quantity that it counts.
    pub(crate) what: &'a str,
}

/// A text on its way to a codec.
pub(crate) struct SpecCursor<'a> {
    text: &'a str,
    /// Byte offset of what comes next.
    at: usize,
}

/// Some editors put it before a text; it is no part of it.
const BYTE_ORDER_MARK: char = '\u{feff}';

impl<'a> SpecCursor<'a> {
    fn new(text: &'a str) -> Self {
        let at = if text.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len_utf8() } else { 0 };
        Self { text, at }
    }

    /// Characters before byte `at`, as an editor counts them.
    fn char_position(&self, at: usize) -> usize {
        self.text[..at].chars().filter(|c| *c != BYTE_ORDER_MARK).count()
    }

    pub(crate) fn fail_at<T>(&self, at: usize, message: impl Into<String>) -> ParseResult<T> {
        Err(SpecError { position: self.char_position(at), message: message.into() })
    }

    /// The next character after spaces and comments, which are skipped.
    fn peek_char(&mut self) -> Option<char> {
        loop {
            let rest = &self.text[self.at..];
            self.at += rest.len() - rest.trim_start().len();
            let next = self.text[self.at..].chars().next();
            if next != Some('#') {
                return next;
            }
            let line = &self.text[self.at..];
            self.at += line.find(['\n', '\r']).unwrap_or(line.len());
        }
    }

    fn take_char(&mut self, wanted: char) -> bool {
        let found = self.peek_char() == Some(wanted);
        if found {
            self.at += wanted.len_utf8();
        }
        found
    }

    fn unknown_word<T>(
        &self,
        start: usize,
        word: &str,
        expected: ExpectedWords<'_>,
    ) -> ParseResult<T> {
        let ExpectedWords { what, known } = expected;
        self.fail_at(start, format!("{word:?} is not a known {what}; expected {known}"))
    }

    fn expect_char(&mut self, wanted: char) -> ParseResult<()> {
        if self.take_char(wanted) {
            Ok(())
        } else {
            self.fail_at(self.at, format!("expected {wanted:?}"))
        }
    }

    /// A run of letters, digits and dots, with the place where it starts.
    fn parse_word(&mut self, what: &str) -> ParseResult<(usize, &'a str)> {
        self.peek_char();
        let rest = &self.text[self.at..];
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '.';
        let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        if length == 0 {
            return self.fail_at(self.at, format!("expected {what}"));
        }
        let start = self.at;
        self.at += length;
        Ok((start, &rest[..length]))
    }

    fn parse_number<N: FromStr>(&mut self, what: &str) -> ParseResult<N> {
        let (start, word) = self.parse_word(what)?;
        self.parse_at(start, word, what)
    }

    pub(crate) fn parse_at<N: FromStr>(
        &self,
        start: usize,
        word: &str,
        what: &str,
    ) -> ParseResult<N> {
        word.parse()
            .or_else(|_| self.fail_at(start, format!("{word:?} is not a number; expected {what}")))
    }

    fn parse_bound(&mut self) -> ParseResult<f32> {
        self.peek_char();
        let start = self.at;
        let bound: f32 = self.parse_number("a relative error")?;
        if bound > 0.0 && bound <= 1.0 {
            return Ok(bound);
        }
        self.fail_at(start, format!("bound {bound}: must be above 0 and at most 1"))
    }

    /// Parses an override behind `k[` or `v[`.
    fn parse_override(&mut self, side: Side) -> ParseResult<SpecOverride> {
        let (mut layers, mut heads) = (None, None);
        loop {
            let (start, name) = self.parse_word("layer or head")?;
            let range = match name {
                "layer" => &mut layers,
                "head" => &mut heads,
                _ => return self.fail_at(start, format!("{name:?} is not layer or head")),
            };
            self.expect_char('=')?;
            if range.replace(self.parse_range()?).is_some() {
                return self.fail_at(start, format!("{name} is given twice"));
            }
            if !self.take_char(',') {
                break;
            }
        }
        self.expect_char(']')?;
        self.expect_char('=')?;
        Ok(SpecOverride { side, layers, heads, spec: self.parse_side()? })
    }

    /// `n` or `n-n`.
    fn parse_range(&mut self) -> ParseResult<RangeInclusive<u32>> {
        self.peek_char();
        let start = self.at;
        let first = self.parse_number("an index")?;
        let last = if self.take_char('-') { self.parse_number("an index")? } else { first };
        if last < first {
            return self.fail_at(start, format!("{first}-{last} ends before it starts"));
        }
        Ok(first..=last)
    }

    fn parse_side(&mut self) -> ParseResult<SideSpec> {
        self.peek_char();
        let side_start = self.at;
        let mut transforms = Vec::new();
        let quantizer = loop {
            let (start, word) = self.parse_word("a transform or a quantizer")?;
            let transform = match Transform::ALL.into_iter().find(|known| known.name() == word) {
                Some(Transform::Rotate { .. }) => self.parse_rotate()?,
                Some(transform) => transform,
                None if transforms.is_empty() && self.peek_char() != Some('+') => {
                    break self.parse_quantizer(start, word)?;
                }
                None => {
                    let known = join_names(&Transform::ALL.map(Transform::name));
                    let expected = ExpectedWords { what: "transform", known: &known };
                    return self.unknown_word(start, word, expected);
                }
            };
            transforms.push(transform);
            if !self.take_char('+') {
                self.expect_char('/')?;
                let (start, word) = self.parse_word("a quantizer")?;
                break self.parse_quantizer(start, word)?;
            }
        };
        let mut entropy = EntropyCoding::None;
        if self.take_char('/') || self.take_char('+') {
            let (start, word) = self.parse_word("huffman")?;
            if word != "huffman" {
                return self
                    .fail_at(start, format!("{word:?} is not an entropy coder; expected huffman"));
            }
            entropy = EntropyCoding::Huffman;
        }
        let side = SideSpec { transforms, quantizer, entropy };
        match side.validate() {
            Ok(()) => Ok(side),
            Err(message) => self.fail_at(side_start, message),
        }
    }

    fn parse_quantizer(&mut self, start: usize, name: &str) -> ParseResult<Quantizer> {
        Quantizer::parse_named(self, QuantizerWord { start, name }).unwrap_or_else(|| {
            let known = join_names(&Quantizer::known_names());
            self.unknown_word(start, name, ExpectedWords { what: "quantizer", known: &known })
        })
    }

    pub(crate) fn parse_arguments(&mut self) -> ParseResult<Vec<Argument<'a>>> {
        self.expect_char('(')?;
        let mut arguments: Vec<Argument<'a>> = Vec::new();
        loop {
            let (start, name) = self.parse_word("an argument")?;
            self.expect_char('=')?;
            let (value_start, value) = self.parse_word("a value")?;
            if arguments.iter().any(|a| a.name == name) {
                return self.fail_at(start, format!("{name} is given twice"));
            }
            arguments.push(Argument { start, name, value_start, value });
            if !self.take_char(',') {
                self.expect_char(')')?;
                return Ok(arguments);
            }
        }
    }

    /// Parses the arguments behind the word `rotate`.
    fn parse_rotate(&mut self) -> ParseResult<Transform> {
        let mut seed = 0;
        if self.peek_char() == Some('(') {
            for Argument { start, name, value_start, value } in self.parse_arguments()? {
                match name {
                    "seed" => seed = self.parse_at(value_start, value, "a seed")?,
                    _ => return self.fail_at(start, format!("rotate has no argument {name:?}")),
                }
            }
        }
        Ok(Transform::Rotate { seed })
    }

    /// The number of a quantizer that takes a single one.
    pub(crate) fn parse_single<N: FromStr>(
        &mut self,
        word: QuantizerWord<'_>,
        syntax: SingleArgument<'_>,
    ) -> ParseResult<N> {
        let SingleArgument { argument, what } = syntax;
        let QuantizerWord { start: word_start, name: quantizer } = word;
        let mut number = None;
        for Argument { start, name, value_start, value } in self.parse_arguments()? {
            if name != argument {
                return self.fail_at(start, format!("{quantizer} has no argument {name:?}"));
            }
            number = Some(self.parse_at(value_start, value, what)?);
        }
        match number {
            Some(number) => Ok(number),
            None => self.fail_at(word_start, format!("{quantizer} needs {argument}=")),
        }
    }
}

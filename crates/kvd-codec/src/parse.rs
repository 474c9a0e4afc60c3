//! The text form of a codec: `k=smooth+hadamard/vq(d=4,b=8); v=vq(d=4,b=8); recent=128`.
//!
//! ```text
//! codec     = item *( ";" item )                 (`resolve` also takes a preset as the first)
//! item      = "k=" side | "v=" side | "sink=" n | "recent=" n | bound | override
//! bound     = ( "k" | "v" ) ".bound=" x
//! override  = ( "k" | "v" ) "[" where *( "," where ) "]=" side
//! where     = ( "layer=" | "head=" ) n [ "-" n ]
//! side      = [ transform *( "+" transform ) "/" ] quantizer [ ( "/" | "+" ) "huffman" ]
//! transform = "smooth" | "norm" | "hadamard" | "mean" | "gain" | "pca" | "qpca"
//!           | "rotate" [ "(seed=" n ")" ]
//! quantizer = "raw" | "f32" | "f16" | "bf16" | "fp8"
//!           | "uniform(" ( "b=" n | "rel=" x ) ",axis=" axis [ ",g=" n ] [ ",mode=" mode ] ")"
//!           | "polar(a=" n ",r=" n [ ",g=" n ] ")" | "lloyd(b=" n ")"
//!           | "vq(d=" n ",b=" n [ ",stages=" n ] [ ",scope=" scope ] ")"
//!           | "grid(rate=" x ")" | "bitalloc(b=" x ")"
//! axis      = "channel" | "token" | "block"
//! mode      = "asym" | "sym" | "hybrid"
//! scope     = "model" | "layer" | "head" | "group"
//! ```
//! Arguments stand in any order; spaces, line ends and comments from `#` to the end of a line are
//! allowed between tokens.

use crate::{
    CodebookScope, CodecSpec, Entropy, FloatFormat, GroupAxis, Override, Quantizer, SideSpec,
    SpecError, Transform, UniformMode, UniformStep, VqSpec,
};
use kvd_core::Side;
use std::ops::RangeInclusive;
use std::str::FromStr;

type Parsed<T> = Result<T, SpecError>;

const TRANSFORMS: &str = "smooth, norm, hadamard, rotate, mean, gain, pca or qpca";
const QUANTIZERS: &str =
    "raw, f32, f16, bf16, fp8, uniform(), vq(), polar(), lloyd(), grid() or bitalloc()";

impl FromStr for CodecSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let mut cursor = Cursor::new(text);
        let items = Items::read(&mut cursor)?;
        let Some(key) = items.key else {
            return cursor.fail(cursor.at, "the key side k= is missing");
        };
        let Some(value) = items.value else {
            return cursor.fail(cursor.at, "the value side v= is missing");
        };
        let (sink, recent) = (items.sink.unwrap_or(0), items.recent.unwrap_or(0));
        let Items { overrides, bounds, .. } = items;
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
    pub(crate) fn read(text: &str) -> FirstWord<'_> {
        let mut cursor = Cursor::new(text);
        cursor.peek();
        let (start, rest) = (cursor.at, &text[cursor.at..]);
        let is_word = |c: char| c.is_ascii_alphanumeric() || "-+.".contains(c);
        let word = &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())];
        cursor.at += word.len();
        let next = cursor.peek();
        let [position, after] = [start, cursor.at].map(|at| cursor.position(at));
        FirstWord { word, position, end: cursor.at, after, next }
    }
}

/// Whether nothing but spaces and comments follows from byte `at` on.
pub(crate) fn is_blank(text: &str, at: usize) -> bool {
    Cursor { text, at }.peek().is_none()
}

/// `base` with what the items of `text` from byte `at` on say in its place; overrides are added.
pub(crate) fn over(base: CodecSpec, text: &str, at: usize) -> Parsed<CodecSpec> {
    let mut cursor = Cursor { text, at };
    if cursor.peek().is_none() {
        return Ok(base);
    }
    let items = Items::read(&mut cursor)?;
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

/// What the items of a text say.
#[derive(Default)]
struct Items {
    key: Option<SideSpec>,
    value: Option<SideSpec>,
    sink: Option<u32>,
    recent: Option<u32>,
    overrides: Vec<Override>,
    bounds: [Option<f32>; 2],
}

impl Items {
    /// All items up to the end of the text; one at least.
    fn read(cursor: &mut Cursor<'_>) -> Parsed<Self> {
        let mut items = Self::default();
        loop {
            items.one(cursor)?;
            if !cursor.take(';') || cursor.peek().is_none() {
                break;
            }
        }
        if cursor.peek().is_some() {
            return cursor.fail(cursor.at, "expected ';' or the end");
        }
        Ok(items)
    }

    fn one(&mut self, cursor: &mut Cursor<'_>) -> Parsed<()> {
        let (start, name) = cursor.word("k, v, sink or recent")?;
        let side = [Side::Key, Side::Value].into_iter().find(|side| side.name() == name);
        if let (Some(side), true) = (side, cursor.take('[')) {
            self.overrides.push(cursor.exception(side)?);
            return Ok(());
        }
        cursor.expect('=')?;
        let fresh = match name {
            "k" => self.key.replace(cursor.side()?).is_none(),
            "v" => self.value.replace(cursor.side()?).is_none(),
            "sink" => self.sink.replace(cursor.number("tokens")?).is_none(),
            "recent" => self.recent.replace(cursor.number("tokens")?).is_none(),
            "k.bound" => self.bounds[0].replace(cursor.bound()?).is_none(),
            "v.bound" => self.bounds[1].replace(cursor.bound()?).is_none(),
            _ => {
                let known = "k, v, sink, recent, k.bound or v.bound";
                return cursor.fail(start, format!("{name:?} is not {known}"));
            }
        };
        if fresh { Ok(()) } else { cursor.fail(start, format!("{name} is given twice")) }
    }
}

/// An argument in parentheses: where it stands, its name and its text.
struct Argument<'a> {
    start: usize,
    name: &'a str,
    value_start: usize,
    value: &'a str,
}

struct Cursor<'a> {
    text: &'a str,
    /// Byte offset of what comes next.
    at: usize,
}

/// Some editors put it before a text; it is no part of it.
const BYTE_ORDER_MARK: char = '\u{feff}';

impl<'a> Cursor<'a> {
    fn new(text: &'a str) -> Self {
        let at = if text.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len_utf8() } else { 0 };
        Self { text, at }
    }

    /// Characters before byte `at`, as an editor counts them.
    fn position(&self, at: usize) -> usize {
        self.text[..at].chars().filter(|c| *c != BYTE_ORDER_MARK).count()
    }

    fn fail<T>(&self, at: usize, message: impl Into<String>) -> Parsed<T> {
        Err(SpecError { position: self.position(at), message: message.into() })
    }

    /// The next character after spaces and comments, which are skipped.
    fn peek(&mut self) -> Option<char> {
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

    fn take(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.at += wanted.len_utf8();
        }
        found
    }

    fn unknown<T>(&self, start: usize, word: &str, (what, known): (&str, &str)) -> Parsed<T> {
        self.fail(start, format!("{word:?} is no {what}; expected {known}"))
    }

    fn expect(&mut self, wanted: char) -> Parsed<()> {
        if self.take(wanted) { Ok(()) } else { self.fail(self.at, format!("expected {wanted:?}")) }
    }

    /// A run of letters, digits and dots, with the place where it starts.
    fn word(&mut self, what: &str) -> Parsed<(usize, &'a str)> {
        self.peek();
        let rest = &self.text[self.at..];
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '.';
        let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        if length == 0 {
            return self.fail(self.at, format!("expected {what}"));
        }
        let start = self.at;
        self.at += length;
        Ok((start, &rest[..length]))
    }

    fn number<N: FromStr>(&mut self, what: &str) -> Parsed<N> {
        let (start, word) = self.word(what)?;
        self.parse_at(start, word, what)
    }

    fn parse_at<N: FromStr>(&self, start: usize, word: &str, what: &str) -> Parsed<N> {
        word.parse().or_else(|_| self.fail(start, format!("{word:?} is no number of {what}")))
    }

    fn bound(&mut self) -> Parsed<f32> {
        self.peek();
        let start = self.at;
        let bound: f32 = self.number("a relative error")?;
        if bound > 0.0 && bound <= 1.0 {
            return Ok(bound);
        }
        self.fail(start, format!("bound {bound}: must be above 0 and at most 1"))
    }

    /// What follows `k[` or `v[`.
    fn exception(&mut self, side: Side) -> Parsed<Override> {
        let (mut layers, mut heads) = (None, None);
        loop {
            let (start, name) = self.word("layer or head")?;
            let range = match name {
                "layer" => &mut layers,
                "head" => &mut heads,
                _ => return self.fail(start, format!("{name:?} is not layer or head")),
            };
            self.expect('=')?;
            if range.replace(self.range()?).is_some() {
                return self.fail(start, format!("{name} is given twice"));
            }
            if !self.take(',') {
                break;
            }
        }
        self.expect(']')?;
        self.expect('=')?;
        Ok(Override { side, layers, heads, spec: self.side()? })
    }

    /// `n` or `n-n`.
    fn range(&mut self) -> Parsed<RangeInclusive<u32>> {
        self.peek();
        let start = self.at;
        let first = self.number("an index")?;
        let last = if self.take('-') { self.number("an index")? } else { first };
        if last < first {
            return self.fail(start, format!("{first}-{last} ends before it starts"));
        }
        Ok(first..=last)
    }

    fn side(&mut self) -> Parsed<SideSpec> {
        self.peek();
        let side_start = self.at;
        let mut transforms = Vec::new();
        let quantizer = loop {
            let (start, word) = self.word("a transform or a quantizer")?;
            let transform = match word {
                "smooth" => Transform::Smooth,
                "hadamard" => Transform::Hadamard,
                "mean" => Transform::Mean,
                "pca" => Transform::Pca,
                "qpca" => Transform::QueryPca,
                "norm" => Transform::Norm,
                "gain" => Transform::Gain,
                "rotate" => self.rotate()?,
                _ if transforms.is_empty() && self.peek() != Some('+') => {
                    break self.quantizer(start, word)?;
                }
                _ => return self.unknown(start, word, ("transform", TRANSFORMS)),
            };
            transforms.push(transform);
            if !self.take('+') {
                self.expect('/')?;
                let (start, word) = self.word("a quantizer")?;
                break self.quantizer(start, word)?;
            }
        };
        let mut entropy = Entropy::None;
        if self.take('/') || self.take('+') {
            let (start, word) = self.word("huffman")?;
            if word != "huffman" {
                return self.fail(start, format!("{word:?} is no entropy stage; expected huffman"));
            }
            entropy = Entropy::Huffman;
        }
        let side = SideSpec { transforms, quantizer, entropy };
        match side.validate() {
            Ok(()) => Ok(side),
            Err(message) => self.fail(side_start, message),
        }
    }

    fn quantizer(&mut self, start: usize, word: &str) -> Parsed<Quantizer> {
        let format = match word {
            "raw" => FloatFormat::Native,
            "f32" => FloatFormat::F32,
            "f16" => FloatFormat::F16,
            "bf16" => FloatFormat::BF16,
            "fp8" => FloatFormat::E4M3,
            "uniform" => return self.uniform(start),
            "vq" => return self.vq(start),
            "grid" => {
                return self.one(start, ("grid", "rate", "bits per value"), |rate| {
                    Quantizer::Grid { rate }
                });
            }
            "bitalloc" => {
                return self.one(start, ("bitalloc", "b", "bits per coefficient"), |bits| {
                    Quantizer::BitAlloc { bits }
                });
            }
            "polar" => return self.polar(start),
            "lloyd" => return self.lloyd(start),
            _ => return self.unknown(start, word, ("quantizer", QUANTIZERS)),
        };
        Ok(Quantizer::Float(format))
    }

    fn arguments(&mut self) -> Parsed<Vec<Argument<'a>>> {
        self.expect('(')?;
        let mut arguments: Vec<Argument<'a>> = Vec::new();
        loop {
            let (start, name) = self.word("an argument")?;
            self.expect('=')?;
            let (value_start, value) = self.word("a value")?;
            if arguments.iter().any(|a| a.name == name) {
                return self.fail(start, format!("{name} is given twice"));
            }
            arguments.push(Argument { start, name, value_start, value });
            if !self.take(',') {
                self.expect(')')?;
                return Ok(arguments);
            }
        }
    }

    fn uniform(&mut self, start: usize) -> Parsed<Quantizer> {
        let (mut step, mut axis, mut group, mut mode) = (None, None, None, UniformMode::Asym);
        for Argument { start, name, value_start, value } in self.arguments()? {
            match name {
                "b" | "rel" if step.is_some() => {
                    return self.fail(start, "b and rel exclude each other");
                }
                "b" => step = Some(UniformStep::Bits(self.parse_at(value_start, value, "bits")?)),
                "rel" => {
                    let rel = self.parse_at(value_start, value, "the range")?;
                    step = Some(UniformStep::Relative(rel));
                }
                "g" => group = Some(self.parse_at(value_start, value, "values per group")?),
                "axis" => {
                    axis = Some(match value {
                        "channel" => GroupAxis::Channel,
                        "token" => GroupAxis::Token,
                        "block" => GroupAxis::Block,
                        _ => return self.fail(value_start, "axis is channel, token or block"),
                    });
                }
                "mode" => {
                    mode = match value {
                        "asym" => UniformMode::Asym,
                        "sym" => UniformMode::Sym,
                        "hybrid" => UniformMode::Hybrid,
                        _ => return self.fail(value_start, "mode is asym, sym or hybrid"),
                    };
                }
                _ => return self.fail(start, format!("uniform has no argument {name:?}")),
            }
        }
        let Some(step) = step else { return self.fail(start, "uniform needs b= or rel=") };
        let Some(axis) = axis else { return self.fail(start, "uniform needs axis=") };
        Ok(Quantizer::Uniform { step, axis, group, mode })
    }

    fn polar(&mut self, start: usize) -> Parsed<Quantizer> {
        let (mut angle, mut radius, mut group) = (None, None, None);
        for Argument { start, name, value_start, value } in self.arguments()? {
            match name {
                "a" => angle = Some(self.parse_at(value_start, value, "angle bits")?),
                "r" => radius = Some(self.parse_at(value_start, value, "radius bits")?),
                "g" => group = Some(self.parse_at(value_start, value, "tokens per group")?),
                _ => return self.fail(start, format!("polar has no argument {name:?}")),
            }
        }
        match (angle, radius) {
            (Some(angle), Some(radius)) => Ok(Quantizer::Polar { angle, radius, group }),
            _ => self.fail(start, "polar needs a= and r="),
        }
    }

    fn lloyd(&mut self, start: usize) -> Parsed<Quantizer> {
        let mut bits = None;
        for Argument { start, name, value_start, value } in self.arguments()? {
            match name {
                "b" => bits = Some(self.parse_at(value_start, value, "bits")?),
                _ => return self.fail(start, format!("lloyd has no argument {name:?}")),
            }
        }
        match bits {
            Some(bits) => Ok(Quantizer::Lloyd { bits }),
            None => self.fail(start, "lloyd needs b="),
        }
    }

    /// What may follow the word `rotate`.
    fn rotate(&mut self) -> Parsed<Transform> {
        let mut seed = 0;
        if self.peek() == Some('(') {
            for Argument { start, name, value_start, value } in self.arguments()? {
                match name {
                    "seed" => seed = self.parse_at(value_start, value, "a seed")?,
                    _ => return self.fail(start, format!("rotate has no argument {name:?}")),
                }
            }
        }
        Ok(Transform::Rotate { seed })
    }

    /// A quantizer with a single number: its name, that of the argument, and what it counts.
    fn one(
        &mut self,
        start: usize,
        (quantizer, argument, what): (&str, &str, &str),
        make: fn(f32) -> Quantizer,
    ) -> Parsed<Quantizer> {
        let mut number = None;
        for Argument { start, name, value_start, value } in self.arguments()? {
            if name != argument {
                return self.fail(start, format!("{quantizer} has no argument {name:?}"));
            }
            number = Some(self.parse_at(value_start, value, what)?);
        }
        match number {
            Some(number) => Ok(make(number)),
            None => self.fail(start, format!("{quantizer} needs {argument}=")),
        }
    }

    fn vq(&mut self, start: usize) -> Parsed<Quantizer> {
        let (mut dim, mut bits) = (None, None);
        let (mut stages, mut scope) = (1, CodebookScope::Head);
        for Argument { start, name, value_start, value } in self.arguments()? {
            match name {
                "d" => dim = Some(self.parse_at(value_start, value, "channels")?),
                "b" => bits = Some(self.parse_at(value_start, value, "bits")?),
                "stages" => stages = self.parse_at(value_start, value, "stages")?,
                "scope" => match CodebookScope::from_name(value) {
                    Some(known) => scope = known,
                    None => return self.fail(value_start, "scope is model, layer, head or group"),
                },
                _ => return self.fail(start, format!("vq has no argument {name:?}")),
            }
        }
        match (dim, bits) {
            (Some(dim), Some(bits)) => Ok(Quantizer::Vq(VqSpec { dim, bits, stages, scope })),
            _ => self.fail(start, "vq needs d= and b="),
        }
    }
}

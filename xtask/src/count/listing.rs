//! What `nvdisasm -c -gi` prints: kernels, their instructions, and the source lines of each, from
//! the innermost function to the kernel.

use std::collections::HashMap;

/// A line of a source file, by the file's number in the listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Frame {
    pub(super) file: usize,
    /// From 1.
    pub(super) line: usize,
}

/// Lines of an instruction: the innermost function's first, the kernel's last.
pub(super) type Chain = Vec<Frame>;

#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) files: Vec<String>,
    pub(super) chains: Vec<Chain>,
    pub(super) kernels: Vec<Kernel>,
}

#[derive(Debug, Default)]
pub(super) struct Kernel {
    pub(super) name: String,
    pub(super) instructions: Vec<Instruction>,
    /// The instruction that a label is before.
    pub(super) labels: HashMap<String, usize>,
    /// Where the compiler's own subroutines begin, which a kernel calls for rare numbers.
    pub(super) subroutines_at: Option<usize>,
}

#[derive(Debug, Default)]
pub(super) struct Instruction {
    /// Whether it is executed by some lanes only.
    pub(super) predicated: bool,
    pub(super) opcode: String,
    pub(super) operands: String,
    /// Of `Listing::chains`.
    pub(super) chain: usize,
}

impl Instruction {
    /// The operation without its modifiers.
    pub(super) fn operation(&self) -> &str {
        self.opcode.split('.').next().unwrap_or_default()
    }

    /// Whether it only says where lanes go or meet: such have the lines of what stands before them.
    pub(super) fn is_control(&self) -> bool {
        ["BRA", "BSSY", "BSYNC", "NOP", "WARPSYNC", "BREAK"].contains(&self.operation())
    }

    /// Labels that it names.
    pub(super) fn targets(&self) -> impl Iterator<Item = &str> {
        let end = |c: char| !(c.is_alphanumeric() || c == '_' || c == '.' || c == '$');
        self.operands.split(end).filter(|word| word.starts_with(".L_"))
    }
}

/// Reads a listing.
pub(super) fn parse(text: &str) -> Listing {
    let mut reader = Reader::default();
    for line in text.lines() {
        reader.line(line);
    }
    reader.listing
}

#[derive(Default)]
struct Reader {
    listing: Listing,
    numbers: HashMap<String, usize>,
    known: HashMap<Chain, usize>,
    /// Lines that are read before the instruction that they belong to.
    pending: Chain,
    chain: usize,
}

impl Reader {
    fn line(&mut self, line: &str) {
        let text = line.trim();
        if let Some(name) = line.trim_start().strip_prefix(".section\t.text.") {
            let name = name.split(',').next().unwrap_or_default().to_owned();
            self.listing.kernels.push(Kernel { name, ..Kernel::default() });
            // What comes before the first known line has none.
            self.pending.clear();
            self.chain = self.number_of(Vec::new());
        } else if let Some(frame) = text.strip_prefix("//## File \"") {
            self.frame(frame);
        } else if text.starts_with(".L_") && text.ends_with(':') {
            let Some(kernel) = self.listing.kernels.last_mut() else { return };
            let at = kernel.instructions.len();
            kernel.labels.insert(text.trim_end_matches(':').to_owned(), at);
        } else if text.starts_with("$__internal_") && text.ends_with(':') {
            let Some(kernel) = self.listing.kernels.last_mut() else { return };
            kernel.subroutines_at.get_or_insert(kernel.instructions.len());
        } else if text.starts_with("/*") {
            self.instruction(text);
        }
    }

    fn frame(&mut self, text: &str) {
        let Some((file, rest)) = text.split_once("\", line ") else { return };
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next();
        let line = digits.and_then(|digits| digits.parse().ok()).unwrap_or(0);
        let next = self.listing.files.len();
        let file = *self.numbers.entry(file.to_owned()).or_insert_with(|| {
            self.listing.files.push(file.to_owned());
            next
        });
        self.pending.push(Frame { file, line });
    }

    fn instruction(&mut self, text: &str) {
        let Some((_, rest)) = text.split_once("*/") else { return };
        let mut words = rest.trim().trim_end_matches(';').trim_end();
        if words.is_empty() {
            return;
        }
        if !self.pending.is_empty() {
            let pending = std::mem::take(&mut self.pending);
            self.chain = self.number_of(pending);
        }
        let predicated = words.starts_with('@');
        if predicated {
            words = words.split_once(' ').map_or("", |(_, rest)| rest.trim_start());
        }
        let (opcode, operands) = words.split_once(' ').unwrap_or((words, ""));
        let Some(kernel) = self.listing.kernels.last_mut() else { return };
        kernel.instructions.push(Instruction {
            predicated,
            opcode: opcode.to_owned(),
            operands: operands.trim().to_owned(),
            chain: self.chain,
        });
    }

    fn number_of(&mut self, chain: Chain) -> usize {
        let next = self.listing.chains.len();
        *self.known.entry(chain).or_insert_with_key(|chain| {
            self.listing.chains.push(chain.clone());
            next
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
\t.section\t.text.kvd_a,\"ax\",@progbits
kvd_a:
\t//## File \"/k/b.cuh\", line 3 inlined at \"/k/a.cu\", line 7
\t//## File \"/k/a.cu\", line 7
        /*0000*/                   LDG.E R4, desc[UR4][R2.64+0x8] ;
        /*0010*/              @!P3 BRA `(.L_x_1) ;
\t//## File \"/k/a.cu\", line 7
.L_x_1:
        /*0020*/                   BRX R4 -0x30 (*\"BRANCH_TARGETS .L_x_1,.L_x_2\"*) ;
.L_x_2:
";

    #[test]
    fn instructions_have_the_lines_before_them() {
        let listing = parse(TEXT);
        let kernel = &listing.kernels[0];
        assert_eq!((kernel.name.as_str(), kernel.instructions.len()), ("kvd_a", 3));
        let lines = |at: usize| {
            let chain = &listing.chains[kernel.instructions[at].chain];
            let name = |frame: &Frame| (listing.files[frame.file].as_str(), frame.line);
            chain.iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!(lines(0), [("/k/b.cuh", 3), ("/k/a.cu", 7)]);
        assert_eq!(lines(1), lines(0));
        assert_eq!(lines(2), [("/k/a.cu", 7)]);
        assert_eq!(kernel.labels[".L_x_1"], 2);
        assert_eq!(kernel.labels[".L_x_2"], 3);
    }

    #[test]
    fn an_instruction_is_its_operation_and_its_targets() {
        let listing = parse(TEXT);
        let [load, branch, table] = &listing.kernels[0].instructions[..] else { panic!() };
        assert_eq!(
            (load.operation(), load.opcode.as_str(), load.predicated),
            ("LDG", "LDG.E", false)
        );
        assert!(branch.predicated);
        assert_eq!(branch.targets().collect::<Vec<_>>(), [".L_x_1"]);
        assert_eq!(table.targets().collect::<Vec<_>>(), [".L_x_1", ".L_x_2"]);
    }
}

//! Which pipe of a multiprocessor takes an instruction, and how many lanes a clock it takes.
//!
//! Rates are the guide's ("Throughput of Native Arithmetic Instructions", CUDA C++ Best Practices
//! Guide, compute capabilities 8.0, 8.9 and 9.0), results of a clock and multiprocessor; loads and
//! stores are taken as shuffles are. Those of 8.9 and 9.0 were not looked up again in the guide of
//! today. Which instructions share a pipe is what NVIDIA says of its
//! profiler's pipelines (Nsight Compute's profiling guide): additions, logic, shifts, comparisons,
//! selections and moves are of one, products of integers of that of floats, of which 8.0 has one
//! of 64 lanes and 8.9 and 9.0 two, the second for floats alone.

/// A pipe, in the order in which they are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pipe {
    /// Integers, logic, shifts, comparisons, moves: 64.
    Integer,
    /// Products of integers: 64, and with floats 64 (8.0) or 128 (8.9, 9.0).
    Multiply,
    /// Sums and products of floats, and pairs of halves.
    Float,
    /// Powers, logarithms, counts of bits, conversions: 16, of some conversions more.
    Special,
    /// Loads, stores, shuffles, of shared and of global memory: 32, if no bank is met twice.
    Memory,
    /// Tensor cores.
    Tensor,
    /// Once for a warp, by a path of its own.
    Uniform,
    /// Branches, barriers and special registers: issued, and taken for no more.
    Control,
}

impl Pipe {
    /// As the count prints it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Integer => "integer",
            Self::Multiply => "multiply",
            Self::Float => "float",
            Self::Special => "special",
            Self::Memory => "memory",
            Self::Tensor => "tensor",
            Self::Uniform => "uniform",
            Self::Control => "control",
        }
    }
}

/// Operations without modifiers.
const PIPES: &[(Pipe, &[&str])] = &[
    (
        Pipe::Integer,
        &[
            "IADD3",
            "IADD",
            "LOP3",
            "LOP",
            "SHF",
            "SHL",
            "SHR",
            "LEA",
            "ISETP",
            "ISET",
            "SEL",
            "FSEL",
            "PRMT",
            "BMSK",
            "SGXT",
            "IABS",
            "IMNMX",
            "VIMNMX",
            "VIMNMX3",
            "VIADD",
            "VIADDMNMX",
            "VABSDIFF",
            "VABSDIFF4",
            "PLOP3",
            "P2R",
            "R2P",
            "FSETP",
            "FMNMX",
            "FSET",
            "HSETP2",
            "HMNMX2",
            "MOV",
            "VOTE",
            "I2FP",
            "F2FP",
            "I2IP",
            "FCHK",
        ],
    ),
    (Pipe::Multiply, &["IMAD", "IMUL", "IDP", "IDP4A"]),
    (Pipe::Float, &["FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2", "FSWZADD"]),
    (Pipe::Special, &["MUFU", "I2F", "F2I", "F2F", "FRND", "POPC", "FLO", "BREV", "I2I"]),
    (
        Pipe::Memory,
        &[
            "LDS", "STS", "LDSM", "STSM", "LDG", "STG", "LDGSTS", "LD", "ST", "LDL", "STL", "SHFL",
            "ATOM", "ATOMS", "ATOMG", "RED", "MATCH", "LDC", "MOVM",
        ],
    ),
    (Pipe::Tensor, &["IMMA", "HMMA", "QMMA"]),
    (Pipe::Uniform, &["R2UR", "S2UR", "REDUX", "VOTEU"]),
    (
        Pipe::Control,
        &[
            "BRA",
            "BRX",
            "BSSY",
            "BSYNC",
            "BREAK",
            "BMOV",
            "WARPSYNC",
            "NOP",
            "BAR",
            "EXIT",
            "CALL",
            "RET",
            "S2R",
            "CS2R",
            "DEPBAR",
            "LDGDEPBAR",
            "YIELD",
            "ELECT",
            "MEMBAR",
            "ERRBAR",
            "CCTL",
            "JMP",
        ],
    ),
];

/// The pipe of an operation; none of one that no list has.
pub(super) fn of(operation: &str) -> Option<Pipe> {
    let known = PIPES.iter().find(|(_, operations)| operations.contains(&operation));
    let uniform = operation.starts_with('U').then_some(Pipe::Uniform);
    known.map(|(pipe, _)| *pipe).or(uniform)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn additions_and_products_of_integers_are_of_two_pipes() {
        let pipes = ["IADD3", "LOP3", "IMAD", "FFMA", "LDS", "MUFU", "IMMA", "ULDC", "BRA"].map(of);
        let names = pipes.map(|pipe| pipe.unwrap().name());
        let wanted = [
            "integer", "integer", "multiply", "float", "memory", "special", "tensor", "uniform",
            "control",
        ];
        assert_eq!(names, wanted);
        assert_eq!(of("XYZ"), None);
    }
}

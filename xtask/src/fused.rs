//! Checks that kernels which write pages fuse no product with a sum, in their disassembly for
//! sm_90. Pages equal the reference encoder's byte for byte only because each product and each sum
//! is rounded on its own. Divisions and roots are made of fused products, and rounded as IEEE says.

use crate::kernels::{self, CudaTools};
use crate::report::StepReport;
use anyhow::{Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The file of the kernels that write pages, and the GPU they are looked through for.
const FILE: &str = "store";
const SM: u32 = 90;
/// Calls of `device.cuh` that are made of fused products and meant to be.
const MEANT: [&str; 5] = ["__fdiv_rn(", "__frcp_rn(", "__fsqrt_rn(", "__ddiv_rn(", "__dsqrt_rn("];
/// Multiply-adds: of f32, of two f16, of f64.
const FUSED: [&str; 3] = ["FFMA", "HFMA2", "DFMA"];
/// First factors of a multiply-add of zero: how some constants come into a register.
const ZERO_PRODUCT: [&str; 2] = ["-RZ", "RZ"];

#[derive(clap::Args)]
pub(crate) struct FusedArguments {
    /// Says so and succeeds where compiler or disassembler are not there and cannot be installed.
    #[arg(long)]
    skip_offline: bool,
}

/// One multiply-add of a kernel's own code.
#[derive(Debug, PartialEq, Eq)]
struct MultiplyAdd {
    kernel: String,
    opcode: String,
    /// Source file and line, from 1, of the innermost function; an empty name where not known.
    source: (PathBuf, usize),
}

/// Compiles the kernels, disassembles them and fails where a product is fused that must not be.
pub(crate) fn check_kernels(
    root: &Path,
    arguments: &FusedArguments,
    report: &StepReport,
) -> Result<()> {
    let tools = match kernels::find_tools(root, report) {
        Err(reason) if arguments.skip_offline => {
            return kernels::skip_step("fused: store kernels not looked through", &reason, report);
        }
        tools => tools?,
    };
    let found = multiply_adds(&disassemble_store(root, &tools)?);
    let count = count_allowed(&found, |file, line| {
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines().nth(line.saturating_sub(1)).unwrap_or_default().to_owned()
    })?;
    report.print_line(&format!("fused products of sm_{SM}: {count}, all of divisions and roots"));
    Ok(())
}

/// The disassembly of the kernel file, with source lines.
fn disassemble_store(root: &Path, tools: &CudaTools) -> Result<String> {
    let out = root.join("target/kernels").join(format!("{FILE}.sm_{SM}.cubin"));
    let source = root.join("kernels").join(FILE).with_extension("cu");
    let mut nvcc = Command::new(&tools.nvcc);
    nvcc.args(["-std=c++17", "-O3", "-lineinfo", "-cubin"]);
    nvcc.arg(format!("-arch=sm_{SM}")).arg("-I").arg(root.join("kernels/include"));
    kernels::command_output(nvcc.arg(source).arg("-o").arg(&out))?;
    kernels::command_output(Command::new(&tools.nvdisasm).args(["-c", "-gi"]).arg(&out))
}

/// Reads what `nvdisasm -c -gi` prints. The compiler's own subroutines for rare numbers, which
/// stand at the end of a kernel, are left out.
fn multiply_adds(listing: &str) -> Vec<MultiplyAdd> {
    let (mut found, mut kernel, mut is_subroutine) = (Vec::new(), String::new(), false);
    let mut source = (PathBuf::new(), 0);
    // The lines of one instruction go from the innermost function outwards.
    let mut is_inner = true;
    for line in listing.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix(".section\t.text.") {
            kernel = name.split(',').next().unwrap_or_default().to_owned();
            (is_subroutine, source) = (false, (PathBuf::new(), 0));
        } else if line.starts_with("$__internal_") && line.ends_with(':') {
            is_subroutine = true;
        } else if let Some(place) = line.strip_prefix("//## File \"") {
            if is_inner {
                source = source_of(place);
            }
            is_inner = false;
        } else if line.starts_with("/*") {
            is_inner = true;
            if let Some(opcode) = fused_opcode(line).filter(|_| !is_subroutine) {
                let (kernel, source) = (kernel.clone(), source.clone());
                found.push(MultiplyAdd { kernel, opcode: opcode.to_owned(), source });
            }
        }
    }
    found
}

/// File and line of `a.cuh", line 7 inlined at ...`.
fn source_of(place: &str) -> (PathBuf, usize) {
    let (file, rest) = place.split_once("\", line ").unwrap_or_default();
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next();
    (file.into(), digits.and_then(|digits| digits.parse().ok()).unwrap_or(0))
}

/// The operation of a line `/*0000*/ @P0 FFMA R1, R2, R3, R4 ;` where it is a multiply-add.
fn fused_opcode(line: &str) -> Option<&str> {
    let code = line.split_once("*/")?.1.trim().trim_end_matches(';').trim_end();
    let code = if code.starts_with('@') { code.split_once(' ')?.1.trim_start() } else { code };
    let (opcode, operands) = code.split_once(' ')?;
    let factors: Vec<&str> = operands.trim().split(", ").skip(1).take(2).collect();
    let is_fused = FUSED.contains(&opcode.split('.').next()?) && factors != ZERO_PRODUCT;
    is_fused.then_some(opcode)
}

/// Counts the multiply-adds of divisions and roots; fails with all others. `line_of` gives the text
/// of a line of a source file.
fn count_allowed(found: &[MultiplyAdd], line_of: impl Fn(&Path, usize) -> String) -> Result<usize> {
    let mut others = Vec::new();
    for MultiplyAdd { kernel, opcode, source: (file, line) } in found {
        let text = line_of(file, *line);
        if !MEANT.iter().any(|call| text.contains(call)) {
            others.push(format!("{kernel}: {opcode} of line {line}, {:?}", text.trim()));
        }
    }
    others.dedup();
    ensure!(others.is_empty(), "products are fused with sums:\n{}", others.join("\n"));
    // Every kernel divides: none at all would be a listing that was not read.
    ensure!(!found.is_empty(), "no fused product at all, not of a division either");
    Ok(found.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
\t.section\t.text.kvd_store_a,\"ax\",@progbits
kvd_store_a:
\t//## File \"/k/device.cuh\", line 1 inlined at \"/k/a.cu\", line 7
\t//## File \"/k/a.cu\", line 7
        /*0000*/                   FFMA R3, R0, R3, R4 ;
        /*0010*/              @!P3 DFMA R6, R6, R8, R10 ;
\t//## File \"/k/a.cu\", line 7
        /*0020*/                   HFMA2.MMA R54, -RZ, RZ, 0, 0 ;
        /*0030*/                   FMUL R1, R2, R3 ;
$__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath:
        /*0040*/                   FFMA R3, R0, R3, R4 ;
";

    fn line_of(file: &Path, line: usize) -> String {
        let is_division = (file, line) == (Path::new("/k/device.cuh"), 1);
        if is_division { "return __fdiv_rn(a, b);" } else { "sum += a * b;" }.to_owned()
    }

    #[test]
    fn an_instruction_has_the_line_of_the_innermost_function() {
        let found = multiply_adds(TEXT);
        let opcodes: Vec<&str> = found.iter().map(|found| &*found.opcode).collect();
        assert_eq!(opcodes, ["FFMA", "DFMA"]);
        for found in found {
            assert_eq!(found.kernel, "kvd_store_a");
            assert_eq!(found.source, (PathBuf::from("/k/device.cuh"), 1));
        }
    }

    #[test]
    fn divisions_may_fuse_products_and_nothing_else() {
        assert_eq!(count_allowed(&multiply_adds(TEXT), line_of).unwrap(), 2);
        for fused in ["FFMA R1, R2, R3, R4", "HFMA2 R1, R2, R3, R4", "DFMA R2, R4, R6, -R8"] {
            let text = TEXT.replace("FMUL R1, R2, R3", fused);
            let error = count_allowed(&multiply_adds(&text), line_of).unwrap_err().to_string();
            assert!(error.contains("kvd_store_a: ") && error.contains("sum += a * b"), "{error}");
        }
    }

    #[test]
    fn a_listing_that_was_not_read_is_refused() {
        assert!(count_allowed(&multiply_adds(""), line_of).is_err());
    }

    #[test]
    fn without_a_disassembler_looking_is_skipped_only_if_that_is_asked_for() {
        let root = tempfile::tempdir().unwrap();
        // It is no folder that a compiler could be in.
        fs::write(root.path().join("target"), "a file").unwrap();
        let of = |skip_offline| {
            check_kernels(root.path(), &FusedArguments { skip_offline }, &StepReport)
        };
        assert!(of(false).is_err());
        assert_eq!(of(true).is_ok(), std::env::var_os("KVD_REQUIRE_KERNELS").is_none());
    }
}

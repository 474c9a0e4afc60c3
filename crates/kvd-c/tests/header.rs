//! `kvd.h` is what the library has: structs of the same layout, in C and in C++, and functions that
//! refuse what can be tested of their arguments.
#![cfg(target_os = "linux")]
#![expect(clippy::print_stdout, reason = "a test that cannot run says why")]

use kvd_c::{
    AttendArgs, CallFailure, ConnectArgs, ModelArgs, QueryArgs, RowsArgs, StoreArgs,
    kvd_abi_version, kvd_attend, kvd_close_sequence, kvd_connect, kvd_disconnect, kvd_memory,
};
use std::fmt::Write;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;
use std::ptr::{null, null_mut};

/// Lines that hold only where a struct of the header has this size and these offsets.
macro_rules! asserts {
    ($($name:literal: $of:ty { $($field:ident),* $(,)? })*) => {{
        let mut text = String::new();
        $(
            writeln!(text, "CHECK(sizeof({}) == {});", $name, size_of::<$of>()).unwrap();
            $(
                let (field, at) = (stringify!($field), offset_of!($of, $field));
                writeln!(text, "CHECK(offsetof({}, {field}) == {at});", $name).unwrap();
            )*
        )*
        text
    }};
}

/// Compiles a text with the header, where there is a compiler.
fn compile(compiler: &str, flags: &[&str], file: &str, text: &str) {
    let dir = tempfile::tempdir().expect("a directory");
    let source = dir.path().join(file);
    std::fs::write(&source, text).expect("a file");
    let include = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(compiler);
    command.args(["-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I"]).arg(include);
    match command.args(flags).arg(&source).output() {
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "no {compiler}: {error}");
            println!("SKIP {file}: no {compiler}: {error}");
        }
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{said}\n{text}");
        }
    }
}

#[test]
fn structs_have_the_layout_of_the_header_in_c_and_in_cxx() {
    let asserts = asserts! {
        "kvd_error": CallFailure { code, retry_after_ms, message }
        "kvd_options": ConnectArgs {
            struct_bytes, ring_entries, region_path, name_space, session, memory_bytes, timeout_us,
            queries_max, spin_us,
        }
        "kvd_model": ModelArgs {
            struct_bytes, layers, kv_heads, head_dim_k, head_dim_v, block_tokens, dtype, rope, name,
            codec, calibration, calibration_bytes,
        }
        "kvd_store_rows": StoreArgs {
            struct_bytes, layer, sequence, start, tokens, k, k_bytes, v, v_bytes,
        }
        "kvd_rows": RowsArgs { offset, token_stride, head_stride }
        "kvd_query": QueryArgs {
            sequence, n_q, kv_length, position, start, end, sliding_window,
        }
        "kvd_attend_batch": AttendArgs {
            struct_bytes, layer, model, q_heads, dtype, scale, soft_cap, queries, query_count, q,
            out, lse,
        }
    };
    let head = "#include \"kvd.h\"\n#include <stddef.h>\n";
    let c = format!("{head}#define CHECK(x) _Static_assert(x, #x)\n{asserts}");
    compile("cc", &["-std=c11", "-pedantic"], "layout.c", &c);
    let cxx = format!("{head}#define CHECK(x) static_assert(x, #x)\n{asserts}");
    compile("c++", &["-std=c++11"], "layout.cc", &cxx);
}

fn failure() -> CallFailure {
    CallFailure { code: 0, retry_after_ms: 0, message: [0; 504] }
}

fn message(failure: &CallFailure) -> String {
    let end = failure.message.iter().position(|byte| *byte == 0).expect("it ends");
    String::from_utf8(failure.message[..end].to_vec()).expect("UTF-8")
}

fn options() -> ConnectArgs {
    ConnectArgs {
        struct_bytes: size_of::<ConnectArgs>() as u32,
        ring_entries: 0,
        region_path: c"/nowhere/kvd.region".as_ptr(),
        name_space: null(),
        session: null(),
        memory_bytes: 0,
        timeout_us: 0,
        queries_max: 0,
        spin_us: 0,
    }
}

/// The code and the message of a refused connect.
fn refused_connect(options: *const ConnectArgs) -> (i32, String) {
    let (mut connection, mut why) = (null_mut(), failure());
    // SAFETY: pointers are null or of what is asked for, unless the test wants them unaligned,
    // which is seen before they are read.
    let code = unsafe { kvd_connect(options, &raw mut connection, &raw mut why) };
    assert!(connection.is_null() && code == why.code);
    (code, message(&why))
}

#[test]
fn arguments_that_cannot_be_are_refused_with_a_reason() {
    assert_eq!(kvd_abi_version(), 1);
    let invalid = |text: &str| (1, text.to_owned());
    assert_eq!(refused_connect(null()), invalid("kvd_options is NULL"));
    let plain = options();
    let unaligned = (&raw const plain).wrapping_byte_add(1);
    assert_eq!(refused_connect(unaligned), invalid("kvd_options is not aligned to 8 bytes"));
    let short = ConnectArgs { struct_bytes: 8, ..options() };
    let said = "kvd_options.struct_bytes is 8; it is 56 in the header of this library";
    assert_eq!(refused_connect(&raw const short), invalid(said));
    let nowhere = ConnectArgs { region_path: null(), ..options() };
    let said = "kvd_options.region_path is NULL";
    assert_eq!(refused_connect(&raw const nowhere), invalid(said));
    let latin = ConnectArgs { name_space: c"\xff".as_ptr(), ..options() };
    let said = "kvd_options.name_space is not UTF-8";
    assert_eq!(refused_connect(&raw const latin), invalid(said));
    let odd = ConnectArgs { ring_entries: 3, ..options() };
    let (code, said) = refused_connect(&raw const odd);
    assert!(code == 1 && said.starts_with("ring_entries is 3"), "{code}: {said}");
    let many = ConnectArgs { queries_max: 4097, ..options() };
    let (code, said) = refused_connect(&raw const many);
    assert!(code == 1 && said.starts_with("queries_max is 4097"), "{code}: {said}");
    let huge = ConnectArgs { memory_bytes: u64::MAX, ..options() };
    assert_eq!(refused_connect(&raw const huge).0, 1);
    // The daemon is not there.
    let (code, said) = refused_connect(&raw const plain);
    assert!(code == 100 && said.contains("region"), "{code}: {said}");
    // SAFETY: all of these are null, or of what is asked for.
    unsafe {
        let mut why = failure();
        assert_eq!(kvd_connect(&raw const plain, null_mut(), &raw mut why), 1);
        assert_eq!(message(&why), "connection is NULL");
        assert_eq!(kvd_attend(null_mut(), null(), &raw mut why), 1);
        assert_eq!(message(&why), "connection is NULL");
        // Nobody wants to know why.
        assert_eq!(kvd_close_sequence(null_mut(), 1, null_mut()), 1);
        let mut bytes = 7;
        assert!(kvd_memory(null(), &raw mut bytes).is_null() && bytes == 7);
        kvd_disconnect(null_mut());
    }
}

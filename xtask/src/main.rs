//! Repository chores.
#![forbid(unsafe_code)]

mod generate;

fn main() -> anyhow::Result<()> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    generate::generate(&root, &root.join(generate::OUTPUT))
}

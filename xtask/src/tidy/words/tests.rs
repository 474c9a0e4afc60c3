use super::*;

fn of(path: &str, text: &str) -> WordCounts {
    let mut measured = MeasuredTree::default();
    measured.add_rust(path, text);
    measured.maxima.crates.values().copied().next().unwrap()
}

#[test]
fn names_of_one_word_count_and_given_ones_do_not() {
    let text = "fn place() {}\nfn new() {}\nfn find_page() {}\nstruct Room;\nstruct PageRoom;\n\
                trait Turn {}\nimpl X for Y {\n    type Item = u8;\n}\n";
    let words = of("crates/kvd/src/a.rs", text);
    assert_eq!((words.one_word_functions, words.one_word_types), (1, 2));
}

#[test]
fn patterns_count_as_arguments_alone() {
    let count = |text: &str| of("xtask/src/a.rs", text).tuple_arguments;
    for text in [
        "fn a((b, c): (u8, u8)) {}",
        "fn a(&self, [b, c]: [u8; 2]) {}",
        "fn a<F: Fn(u8) -> u8>(\n    x: F,\n    (b, c): (u8, u8),\n) {}",
    ] {
        assert_eq!(count(text), 1, "{text}");
    }
    for text in [
        "fn a(b: (u8, u8), c: [u8; 2]) {}",
        "fn a() { f(|(b, c)| b) }",
        "fn a<T: Fn((u8, u8))>(t: T, u: Vec<(u8, [u8; 2])>) {}",
        "type F = fn((u8, u8));",
    ] {
        assert_eq!(count(text), 0, "{text}");
    }
}

#[test]
fn doc_comments_count_by_how_they_begin() {
    let text = "//! What it is.\n\n/// Of a side.\n/// What follows.\nfn a_b() {}\n/// Offset.\n\
                /// The same.\nconst A: u8 = 0;\n/// Whatever.\nconst B: u8 = 0;\n";
    assert_eq!(of("tests/e2e/a.rs", text).doc_openings, 2);
    assert_eq!(of("tests/e2e/a.rs", text).one_word_functions, 0, "a test");
}

#[test]
fn code_after_the_tests_begin_does_not_count() {
    let text = "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\n";
    assert_eq!(of("crates/kvd/src/a.rs", text).one_word_functions, 1);
}

#[test]
fn tables_code_and_link_targets_are_not_prose() {
    let long = "a ".repeat(51);
    for text in
        [format!("| {long} |"), format!("```\n{long}\n```"), format!("    {long}"), "a".repeat(100)]
    {
        assert_eq!(long_lines(&text), 0, "{text}");
    }
    assert_eq!(long_lines(&format!("[a](https://{})", "x".repeat(100))), 0);
    assert_eq!(long_lines(&long), 1);
}

#[test]
fn figures_may_fall_and_not_rise() {
    let mut measured = MeasuredTree::default();
    measured.add_rust("crates/kvd/src/a.rs", "fn a() {}\nfn b() {}\nfn c((d, e): (u8, u8)) {}\n");
    measured.add_markdown("README.md", &"word\n".repeat(131));
    measured.add_markdown("docs/a.md", &format!("{}\n", "long ".repeat(30)));
    let words = |one_word_functions| WordCounts {
        one_word_functions,
        tuple_arguments: 1,
        ..WordCounts::default()
    };
    let maxima = |functions, long| WordMaxima {
        markdown_words: 1000,
        long_lines: [("docs/a.md".to_owned(), long)].into(),
        crates: [("kvd".to_owned(), words(functions))].into(),
    };
    let readme = "README.md: lines: 131, at most 130 (xtask/src/tidy/words.toml)";
    assert_eq!(measured.findings(&maxima(3, 1)), [readme]);
    let found = measured.findings(&maxima(2, 0));
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[2].starts_with("kvd: functions named by one word: 3, at most 2"), "{found:?}");
    // A maximum is lowered and never raised; a file that is not listed stays so.
    let lesser = measured.lesser(&maxima(9, 5));
    assert_eq!(lesser.crates["kvd"], words(3));
    assert_eq!((lesser.long_lines["docs/a.md"], lesser.markdown_words), (1, 161));
    assert_eq!(measured.lesser(&maxima(2, 0)).crates["kvd"], words(2));
    assert_eq!(measured.lesser(&WordMaxima::default()).long_lines.len(), 0);
}

//! The name `kvd` in the package index of Python belongs to others: no line may tell anybody to
//! install it from there.

use super::TidyFinding;

/// Files whose lines people copy.
pub(super) const PATTERNS: [&str; 4] = ["*.md", "*.py", "*.sh", "*.toml"];

/// The lines that install a package of that name.
pub(super) fn find_foreign_packages(text: &str) -> Vec<TidyFinding> {
    let installs = |line: &&str| {
        let command = line.split(" #").next().unwrap_or(line);
        let Some((_, packages)) = command.split_once("pip install ") else { return false };
        let words = packages.split([' ', '\'', '"', '`', ')', ';']);
        words.map(|word| word.split('[').next().unwrap_or(word)).any(|word| word == "kvd")
    };
    let lines = text.lines().enumerate().filter(|(_, line)| installs(line));
    let what = "installs `kvd` of the package index, which is not this project";
    lines.map(|(at, _)| TidyFinding::new(at + 1, what)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_found_with_extras_and_beside_others_and_folders_are_not() {
        let lines = |text: &str| find_foreign_packages(text).len();
        let install = "pip install";
        assert_eq!(lines(&format!("{install} kvd")), 1);
        assert_eq!(lines(&format!("x\n`{install} --quiet 'kvd[grpc]' numpy`")), 1);
        assert_eq!(lines(&format!("{install} ./clients/python[events] kvd-client  # kvd")), 0);
        assert_eq!(lines("kvd serve"), 0);
    }
}

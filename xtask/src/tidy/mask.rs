//! Rust text with everything blanked that is not code, so that a brace in a string or a word in a
//! comment cannot fool the rules. Every character keeps its line and column.

/// `text` with comments and the contents of string and character literals replaced by spaces.
pub(super) fn mask_text(text: &str) -> String {
    let mut masker = CodeMasker { input: text.chars().collect(), at: 0, output: String::new() };
    while masker.at < masker.input.len() {
        masker.step();
    }
    masker.output
}

struct CodeMasker {
    input: Vec<char>,
    at: usize,
    output: String,
}

impl CodeMasker {
    fn peek(&self, ahead: usize) -> char {
        self.input.get(self.at + ahead).copied().unwrap_or('\0')
    }

    fn keep(&mut self, count: usize) {
        let end = (self.at + count).min(self.input.len());
        self.output.extend(&self.input[self.at..end]);
        self.at = end;
    }

    fn blank(&mut self, count: usize) {
        let end = (self.at + count).min(self.input.len());
        let blank = |c: &char| if *c == '\n' { '\n' } else { ' ' };
        self.output.extend(self.input[self.at..end].iter().map(blank));
        self.at = end;
    }

    fn step(&mut self) {
        match (self.peek(0), self.peek(1)) {
            ('/', '/') => self.line_comment(),
            ('/', '*') => self.block_comment(),
            ('"', _) => self.string(),
            ('\'', _) => self.quote(),
            (c, _) if c.is_alphanumeric() || c == '_' => self.word(),
            _ => self.keep(1),
        }
    }

    fn line_comment(&mut self) {
        while self.at < self.input.len() && self.peek(0) != '\n' {
            self.blank(1);
        }
    }

    fn block_comment(&mut self) {
        let mut depth = 0;
        while self.at < self.input.len() {
            match (self.peek(0), self.peek(1)) {
                ('/', '*') => depth += 1,
                ('*', '/') => depth -= 1,
                _ => {
                    self.blank(1);
                    continue;
                }
            }
            self.blank(2);
            if depth == 0 {
                return;
            }
        }
    }

    fn string(&mut self) {
        self.keep(1);
        while self.at < self.input.len() && self.peek(0) != '"' {
            self.blank(if self.peek(0) == '\\' { 2 } else { 1 });
        }
        self.keep(1);
    }

    /// A character literal or a lifetime: a literal closes after one character or an escape.
    fn quote(&mut self) {
        self.keep(1);
        if self.peek(0) == '\\' {
            self.blank(2);
            while self.at < self.input.len() && self.peek(0) != '\'' {
                self.blank(1);
            }
            self.keep(1);
        } else if self.peek(1) == '\'' {
            self.blank(1);
            self.keep(1);
        }
    }

    /// An identifier or number, which may turn out to be the prefix of a raw string.
    fn word(&mut self) {
        let start = self.at;
        while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
            self.keep(1);
        }
        let prefix: String = self.input[start..self.at].iter().collect();
        if !matches!(prefix.as_str(), "r" | "br" | "cr") {
            return;
        }
        let mut hashes = 0;
        while self.peek(hashes) == '#' {
            hashes += 1;
        }
        // `r#name` is a raw identifier.
        if self.peek(hashes) == '"' {
            self.raw_string(hashes);
        }
    }

    fn raw_string(&mut self, hashes: usize) {
        self.keep(hashes + 1);
        let closes = |masker: &Self| {
            masker.peek(0) == '"' && (1..=hashes).all(|ahead| masker.peek(ahead) == '#')
        };
        while self.at < self.input.len() && !closes(self) {
            self.blank(1);
        }
        self.keep(hashes + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_and_comments_are_blanked_in_place() {
        for (text, expected) in [
            (r#"a("{\"}") // {"#, r#"a("    ")     "#),
            ("/* { /* } */ { */ b", "                  b"),
            ("let c = '{'; let d = '\\'';", "let c = ' '; let d = '  ';"),
            ("fn f<'a>(x: &'a str) {}", "fn f<'a>(x: &'a str) {}"),
            ("r#\"{ \" }\"# + br\"\\\" + r#type", "r#\"     \"# + br\" \" + r#type"),
            ("'\\u{1F600}' }", "'         ' }"),
            ("for\"{\"", "for\" \""),
            ("\"open {", "\"      "),
        ] {
            assert_eq!(mask_text(text), expected, "{text}");
            assert_eq!(mask_text(text).chars().count(), text.chars().count(), "{text}");
        }
    }

    #[test]
    fn lines_keep_their_numbers() {
        let text = "a\n/* x\ny */ \"p\nq\"\nb";
        let masked = mask_text(text);
        assert_eq!(masked.lines().count(), text.lines().count());
        assert_eq!(masked.lines().last(), Some("b"));
    }
}

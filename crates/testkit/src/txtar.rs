// SPDX-License-Identifier: Apache-2.0

//! The txtar format: a comment, then named sections, each opened by a line `-- NAME --`.
//!
//! It is trivial on purpose: a test case with several files in it that diffs, reviews and greps as one text.

/// A parsed archive. Line numbers count from 1, as editors do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Archive {
    /// What stands before the first section.
    pub comment: String,
    pub sections: Vec<Section>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    pub name: String,
    /// The line of the section's first line of text, the one below its heading.
    pub line: usize,
    pub text: String,
}

impl Archive {
    /// Every text is an archive; one without sections is all comment.
    pub fn parse(text: &str) -> Archive {
        let mut archive = Archive { comment: String::new(), sections: Vec::new() };
        for (index, line) in text.split_inclusive('\n').enumerate() {
            if let Some(name) = heading(line) {
                archive.sections.push(Section {
                    name: name.to_owned(),
                    line: index + 2,
                    text: String::new(),
                });
                continue;
            }
            match archive.sections.last_mut() {
                Some(section) => section.text.push_str(line),
                None => archive.comment.push_str(line),
            }
        }
        archive
    }

    /// The text that parses to this archive.
    pub fn render(&self) -> String {
        let mut out = self.comment.clone();
        for section in &self.sections {
            if !out.is_empty() && !out.ends_with('\n') {
                out.push('\n');
            }
            out.push_str(&format!("-- {} --\n{}", section.name, section.text));
        }
        out
    }
}

fn heading(line: &str) -> Option<&str> {
    let name = line.trim_end().strip_prefix("-- ")?.strip_suffix(" --")?.trim();
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_and_sections() {
        let text = "why\n\n-- config --\nx: 1\n-- empty --\n-- last --\n--- yaml\n-- not a heading\nend";
        let archive = Archive::parse(text);
        assert_eq!(archive.comment, "why\n\n");
        let sections: Vec<_> = archive
            .sections
            .iter()
            .map(|section| (section.name.as_str(), section.line, section.text.as_str()))
            .collect();
        assert_eq!(
            sections,
            [("config", 4, "x: 1\n"), ("empty", 6, ""), ("last", 7, "--- yaml\n-- not a heading\nend")]
        );
        assert_eq!(archive.render(), text);
    }

    #[test]
    fn no_section_is_all_comment() {
        assert_eq!(Archive::parse("-- --\n").comment, "-- --\n");
        assert_eq!(Archive::parse("").sections, []);
    }
}

// SPDX-License-Identifier: Apache-2.0

//! How a command prints what it has found.

/// For people, or for programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Output {
    /// Columns.
    #[default]
    Table,
    /// JSON.
    Json,
}

impl Output {
    /// Takes `-o`, `--output` out of a command line whose other flags are somebody else's.
    pub(super) fn split(args: &[String]) -> Result<(Output, Vec<String>), String> {
        let mut output = Output::default();
        let mut rest = Vec::new();
        let mut words = args.iter();
        while let Some(word) = words.next() {
            let value = match word.as_str() {
                "-o" | "--output" => words.next().map(String::as_str).ok_or(WORDS)?,
                word => match word.strip_prefix("--output=").or_else(|| word.strip_prefix("-o")) {
                    Some(value) => value.trim_start_matches('='),
                    None => {
                        rest.push(word.to_owned());
                        continue;
                    }
                },
            };
            output = Output::parse(value)?;
        }
        Ok((output, rest))
    }

    /// `table` or `json`.
    pub(super) fn parse(word: &str) -> Result<Output, &'static str> {
        match word {
            "table" => Ok(Output::Table),
            "json" => Ok(Output::Json),
            _ => Err(WORDS),
        }
    }
}

const WORDS: &str = "the output must be table or json, as in -o json";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_taken_out_wherever_it_stands() {
        for (line, output, rest) in [
            ("", Output::Table, ""),
            ("a -o json b", Output::Json, "a b"),
            ("-ojson", Output::Json, ""),
            ("--output=json -o=table --oom-score-adj=1", Output::Table, "--oom-score-adj=1"),
        ] {
            let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            assert_eq!(Output::split(&words(line)), Ok((output, words(rest))), "{line}");
        }
        assert!(Output::split(&["-o".to_owned(), "xml".to_owned()]).is_err());
        assert!(Output::split(&["-o".to_owned()]).is_err());
    }
}

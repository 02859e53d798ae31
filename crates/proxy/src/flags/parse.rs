// SPDX-License-Identifier: Apache-2.0

//! A command line read as Go's pflag reads it: `--a-b` and `--a_b` are one flag, a value follows after `=` or
//! as the next word, a boolean stands alone or has `=value` but never takes the next word, one-letter flags
//! take `-v4`, `-v=4` and `-v 4`, and `--` ends the flags.

/// One flag, and what it does to a `T`.
pub struct Flag<T> {
    pub name: &'static str,
    pub letter: Option<char>,
    /// What the usage text calls the value; empty for a boolean.
    pub value: &'static str,
    pub default: &'static str,
    pub help: &'static str,
    /// The value of the flag alone, for those that need none.
    pub alone: Option<&'static str>,
    /// Effective also beside `--config`.
    pub always: bool,
    /// Left out of the usage text; with what to say when it is used.
    pub deprecated: Option<&'static str>,
    pub set: fn(&mut T, &str) -> Result<(), String>,
}

impl<T> Flag<T> {
    /// A flag that needs a value.
    pub const fn new(
        name: &'static str,
        value: &'static str,
        default: &'static str,
        help: &'static str,
        set: fn(&mut T, &str) -> Result<(), String>,
    ) -> Flag<T> {
        Flag { name, letter: None, value, default, help, alone: None, always: false, deprecated: None, set }
    }

    /// A flag that is true when it stands alone.
    pub const fn boolean(
        name: &'static str,
        default: &'static str,
        help: &'static str,
        set: fn(&mut T, &str) -> Result<(), String>,
    ) -> Flag<T> {
        Flag { alone: Some("true"), ..Flag::new(name, "", default, help, set) }
    }

    /// The same, effective also beside `--config`.
    pub const fn always(mut self) -> Flag<T> {
        self.always = true;
        self
    }

    /// The same with a short form.
    pub const fn letter(mut self, letter: char) -> Flag<T> {
        self.letter = Some(letter);
        self
    }

    /// The same, hidden, with advice for those who use it.
    pub const fn deprecated(mut self, advice: &'static str) -> Flag<T> {
        self.deprecated = Some(advice);
        self
    }

    /// Name and letter as error messages have them.
    fn label(&self) -> String {
        match self.letter {
            Some(letter) => format!("-{letter}, --{}", self.name),
            None => format!("--{}", self.name),
        }
    }
}

/// What a command line was made of.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    /// Each flag that was given, in order, with its value.
    pub given: Vec<(&'static str, String)>,
    pub positional: Vec<String>,
}

/// Reads `args` and applies each flag to `target`. The error is one line, without `Error:` before it.
pub fn parse<T>(flags: &[Flag<T>], target: &mut T, args: &[String]) -> Result<Parsed, String> {
    let mut parsed = Parsed::default();
    let mut words = args.iter();
    while let Some(word) = words.next() {
        if word == "--" {
            parsed.positional.extend(words.cloned());
            break;
        }
        if let Some(long) = word.strip_prefix("--") {
            let (name, value) = split(long);
            if name.is_empty() || name.starts_with('-') {
                return Err(format!("bad flag syntax: {word}"));
            }
            let normal = name.replace('_', "-");
            let flag = flags.iter().find(|flag| flag.name == normal);
            let flag =
                flag.ok_or_else(|| format!("unknown flag: --{normal}{}", suggestion(flags, &normal)))?;
            let value = value.or(flag.alone).or_else(|| words.next().map(String::as_str));
            let value = value.ok_or_else(|| format!("flag needs an argument: --{normal}"))?;
            apply(flag, target, value, &mut parsed)?;
        } else if word.len() > 1 && word.starts_with('-') {
            letters(flags, target, &word[1..], (&mut words, &mut parsed))?;
        } else {
            parsed.positional.push(word.clone());
        }
    }
    Ok(parsed)
}

fn letters<T>(
    flags: &[Flag<T>],
    target: &mut T,
    mut cluster: &str,
    (words, parsed): (&mut std::slice::Iter<'_, String>, &mut Parsed),
) -> Result<(), String> {
    let whole = cluster;
    while let Some(letter) = cluster.chars().next() {
        let flag = flags.iter().find(|flag| flag.letter == Some(letter));
        let flag = flag.ok_or_else(|| format!("unknown shorthand flag: '{letter}' in -{whole}"))?;
        cluster = &cluster[letter.len_utf8()..];
        if let Some(value) = cluster.strip_prefix('=') {
            return apply(flag, target, value, parsed);
        }
        if let Some(alone) = flag.alone {
            apply(flag, target, alone, parsed)?;
            continue;
        }
        if !cluster.is_empty() {
            return apply(flag, target, cluster, parsed);
        }
        let value = words.next().ok_or_else(|| format!("flag needs an argument: '{letter}' in -{whole}"))?;
        return apply(flag, target, value, parsed);
    }
    Ok(())
}

fn apply<T>(flag: &Flag<T>, target: &mut T, value: &str, parsed: &mut Parsed) -> Result<(), String> {
    (flag.set)(target, value)
        .map_err(|reason| format!("invalid argument {value:?} for {:?} flag: {reason}", flag.label()))?;
    parsed.given.push((flag.name, value.to_owned()));
    Ok(())
}

fn split(word: &str) -> (&str, Option<&str>) {
    match word.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (word, None),
    }
}

fn suggestion<T>(flags: &[Flag<T>], name: &str) -> String {
    let shown = flags.iter().filter(|flag| flag.deprecated.is_none());
    match nearest(shown.map(|flag| flag.name), name) {
        Some(nearest) => format!(" (did you mean --{nearest}?)"),
        None => String::new(),
    }
}

/// The nearest name, if one is near enough to be a slip of the finger.
pub fn nearest<'a>(names: impl Iterator<Item = &'a str>, word: &str) -> Option<&'a str> {
    let (steps, nearest) = names.map(|name| (distance(name, word), name)).min()?;
    (steps <= 1 + word.len() / 8).then_some(nearest)
}

/// Letters to add, remove or replace to make one of the other (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, right) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(left != right);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// The usage text's list of flags.
pub fn usage<T>(flags: &[Flag<T>]) -> String {
    let mut text = String::new();
    for flag in flags.iter().filter(|flag| flag.deprecated.is_none()) {
        let letter = flag.letter.map_or("    ".into(), |letter| format!("-{letter}, "));
        let default = match flag.default {
            "" | "false" => String::new(),
            default => format!(" (default {default})"),
        };
        let head = format!("  {letter}--{} {}", flag.name, flag.value);
        text.push_str(head.trim_end());
        text.push_str(&format!("\n          {}{default}\n", flag.help));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    type Seen = Vec<String>;

    const FLAGS: &[Flag<Seen>] = &[
        Flag::new("a-b", "string", "", "", |seen, value| {
            seen.push(format!("a-b={value}"));
            Ok(())
        }),
        Flag::boolean("on", "false", "", |seen: &mut Seen, value| match crate::syntax::parse_bool(value) {
            Some(on) => {
                seen.push(format!("on={on}"));
                Ok(())
            }
            None => Err("not a boolean".into()),
        })
        .letter('o'),
        Flag::new("v", "level", "0", "", |seen: &mut Seen, value| {
            seen.push(format!("v={value}"));
            Ok(())
        })
        .letter('v'),
    ];

    fn run(words: &[&str]) -> Result<(Seen, Vec<String>), String> {
        let args: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let mut seen = Seen::new();
        parse(FLAGS, &mut seen, &args).map(|parsed| (seen, parsed.positional))
    }

    #[test]
    fn every_way_of_writing_a_flag() {
        let table: &[(&[&str], &[&str], &[&str])] = &[
            (&["--a-b", "x"], &["a-b=x"], &[]),
            (&["--a_b=x"], &["a-b=x"], &[]),
            (&["--a-b="], &["a-b="], &[]),
            (&["--a-b=x=y"], &["a-b=x=y"], &[]),
            (&["--a-b", "--on"], &["a-b=--on"], &[]),
            (&["--on"], &["on=true"], &[]),
            (&["--on=F"], &["on=false"], &[]),
            (&["--on", "false"], &["on=true"], &["false"]),
            (&["-o", "-v", "4"], &["on=true", "v=4"], &[]),
            (&["-ov4"], &["on=true", "v=4"], &[]),
            (&["-v=4", "--v=5", "--v", "6"], &["v=4", "v=5", "v=6"], &[]),
            (&["--", "--on", "-v"], &[], &["--on", "-v"]),
            (&["-"], &[], &["-"]),
        ];
        for (words, seen, positional) in table {
            let (got, rest) = run(words).expect("a valid line");
            assert_eq!(
                (&got[..], &rest[..]),
                (
                    &seen.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()[..],
                    &positional.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()[..]
                ),
                "{words:?}"
            );
        }
    }

    #[test]
    fn every_way_of_getting_it_wrong() {
        let table: &[(&[&str], &str)] = &[
            (&["--foo"], "unknown flag: --foo"),
            (&["--foo_bar=1"], "unknown flag: --foo-bar"),
            (&["--ab"], "unknown flag: --ab (did you mean --a-b?)"),
            (&["-x"], "unknown shorthand flag: 'x' in -x"),
            (&["-ox"], "unknown shorthand flag: 'x' in -ox"),
            (&["--a-b"], "flag needs an argument: --a-b"),
            (&["-v"], "flag needs an argument: 'v' in -v"),
            (&["--on=maybe"], "invalid argument \"maybe\" for \"-o, --on\" flag: not a boolean"),
            (&["--=x"], "bad flag syntax: --=x"),
            (&["---x"], "bad flag syntax: ---x"),
        ];
        for (words, message) in table {
            assert_eq!(run(words).unwrap_err(), *message, "{words:?}");
        }
    }
}

//! The pre-tokenizer `joyai-llm`: where a text is cut before merges apply.
//!
//! Three splits one after the other, as in the model's `tokenizer.json`, each seeing only what the earlier ones left:
//!
//! 1. `\p{N}{1,3}`
//! 2. `[一-龥぀-ゟ゠-ヿ]+`
//! 3. ``[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+``
//!
//! Written as a scanner that looks at each character a bounded number of times.

use unicode_general_category::{GeneralCategory as G, get_general_category};

/// What the patterns ask of a character.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    Letter,
    Mark,
    Number,
    /// `\p{P}` or `\p{S}`
    Symbol,
    /// `\r` or `\n`
    Newline,
    /// Other `\s`
    Space,
    Other,
}

fn class(c: char) -> Class {
    if c.is_ascii() {
        return match c {
            'a'..='z' | 'A'..='Z' => Class::Letter,
            '0'..='9' => Class::Number,
            '\r' | '\n' => Class::Newline,
            ' ' | '\t' | '\x0b' | '\x0c' => Class::Space,
            '!'..='~' => Class::Symbol,
            _ => Class::Other,
        };
    }
    if c.is_whitespace() {
        return Class::Space;
    }
    match get_general_category(c) {
        G::UppercaseLetter | G::LowercaseLetter | G::TitlecaseLetter | G::ModifierLetter | G::OtherLetter => {
            Class::Letter
        }
        G::NonspacingMark | G::SpacingMark | G::EnclosingMark => Class::Mark,
        G::DecimalNumber | G::LetterNumber | G::OtherNumber => Class::Number,
        G::ConnectorPunctuation
        | G::DashPunctuation
        | G::OpenPunctuation
        | G::ClosePunctuation
        | G::InitialPunctuation
        | G::FinalPunctuation
        | G::OtherPunctuation
        | G::MathSymbol
        | G::CurrencySymbol
        | G::ModifierSymbol
        | G::OtherSymbol => Class::Symbol,
        _ => Class::Other,
    }
}

fn is_cjk(c: char) -> bool {
    matches!(c, '\u{4e00}'..='\u{9fa5}' | '\u{3040}'..='\u{30ff}')
}

/// Calls `piece` with every piece of `text`, in order; together they are the text.
pub fn split<'t>(text: &'t str, piece: &mut impl FnMut(&'t str)) {
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let len = if class(c) == Class::Number {
            prefix(rest, 3, |c| class(c) == Class::Number)
        } else if is_cjk(c) {
            prefix(rest, usize::MAX, is_cjk)
        } else {
            let len = prefix(rest, usize::MAX, |c| class(c) != Class::Number && !is_cjk(c));
            words(&rest[..len], piece);
            rest = &rest[len..];
            continue;
        };
        let (head, tail) = rest.split_at(len);
        piece(head);
        rest = tail;
    }
}

/// Bytes of the longest prefix of at most `max` characters that all satisfy `f`.
fn prefix(text: &str, max: usize, f: impl Fn(char) -> bool) -> usize {
    text.char_indices()
        .enumerate()
        .find(|(n, (_, c))| *n == max || !f(*c))
        .map_or(text.len(), |(_, (at, _))| at)
}

/// The third split. What no alternative matches forms pieces of its own between the matches.
fn words<'t>(text: &'t str, piece: &mut impl FnMut(&'t str)) {
    let mut at = 0;
    let mut unmatched = 0;
    while at < text.len() {
        match word(&text[at..]) {
            0 => at += text[at..].chars().next().map_or(1, char::len_utf8),
            len => {
                if unmatched < at {
                    piece(&text[unmatched..at]);
                }
                piece(&text[at..at + len]);
                at += len;
                unmatched = at;
            }
        }
    }
    if unmatched < text.len() {
        piece(&text[unmatched..]);
    }
}

/// Bytes of the match at the start of `text` (the alternatives in their order); 0 where there is none.
fn word(text: &str) -> usize {
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return 0 };
    let first_len = first.len_utf8();
    let after = &text[first_len..];
    let kind = class(first);
    let letters = |t: &str| prefix(t, usize::MAX, |c| matches!(class(c), Class::Letter | Class::Mark));

    if first.is_ascii_punctuation() {
        let len = prefix(after, usize::MAX, |c| c.is_ascii_alphabetic());
        if len > 0 {
            return first_len + len;
        }
    }
    match kind {
        // Anything but a newline, letter or symbol may stand in front of the letters.
        Class::Mark | Class::Space | Class::Other => {
            let len = letters(after);
            if len > 0 {
                return first_len + len;
            }
            if kind == Class::Mark {
                return first_len;
            }
        }
        Class::Letter => return letters(text),
        _ => {}
    }
    let symbols = |t: &str| prefix(t, usize::MAX, |c| class(c) == Class::Symbol);
    let newlines = |t: &str| prefix(t, usize::MAX, |c| class(c) == Class::Newline);
    let lead = usize::from(first == ' ');
    let run = symbols(&text[lead..]);
    if run > 0 {
        return lead + run + newlines(&text[lead + run..]);
    }
    if matches!(kind, Class::Space | Class::Newline) {
        let run = prefix(text, usize::MAX, |c| matches!(class(c), Class::Space | Class::Newline));
        let space = &text[..run];
        if let Some(last) = space.rfind(['\r', '\n']) {
            return last + 1;
        }
        // A run in front of something leaves its last character to it.
        let last = space.char_indices().next_back().map_or(0, |(at, _)| at);
        return if run == text.len() || last == 0 { run } else { last };
    }
    0
}

#[cfg(test)]
mod tests {
    use super::split;

    fn pieces(text: &str) -> Vec<&str> {
        let mut v = Vec::new();
        split(text, &mut |p| v.push(p));
        assert_eq!(v.concat(), text);
        v
    }

    #[test]
    fn cases() {
        assert_eq!(pieces("a   b"), ["a", "  ", " b"]);
        assert_eq!(pieces("1234567"), ["123", "456", "7"]);
        assert_eq!(pieces("don't.stop"), ["don", "'t", ".stop"]);
        assert_eq!(pieces("x\n\n  y"), ["x", "\n\n", " ", " y"]);
        assert_eq!(pieces("hi!!\n\nyo"), ["hi", "!!\n\n", "yo"]);
        assert_eq!(pieces("日本語text"), ["日本語", "text"]);
        assert_eq!(pieces("\u{0}\u{1}a"), ["\u{0}", "\u{1}a"]);
        assert_eq!(pieces("tail  "), ["tail", "  "]);
        assert_eq!(pieces(""), Vec::<&str>::new());
    }
}

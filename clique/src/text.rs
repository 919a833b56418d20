//! Texts of others, for people: [`printable`].

/// A text in which nothing moves a cursor, begins a line or changes a colour: what does not print is written as an escape.
/// What is printable stays as it is, so it does no harm to do it again on the way.
pub(crate) fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '\'' | '"' | '\\' => printable.push(letter),
            _ => printable.extend(letter.escape_debug()),
        }
    }
    printable
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_print_is_escaped_and_the_rest_stays() {
        let plain = "process 5 on höst-1: \"a\\b\", it's 漢字";
        assert_eq!(printable(plain), plain);
        let hostile = "a\nb\r\x1b[2Jc\0\u{7f}\u{9b}31m\u{202e}\u{2028}\t";
        let shown = printable(hostile);
        assert_eq!(shown, "a\\nb\\r\\u{1b}[2Jc\\0\\u{7f}\\u{9b}31m\\u{202e}\\u{2028}\\t");
        assert!(!shown.chars().any(char::is_control));
        assert_eq!(printable(&shown), shown, "once is enough");
    }
}

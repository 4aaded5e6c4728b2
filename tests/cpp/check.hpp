// The C++ tests' one tool: CHECK counts what does not hold and says where and with which values; a test's main returns
// strata::test::result(). (No test framework: a fresh machine has none, and these tests need nothing more.)
#pragma once

#include <iostream>

namespace strata::test {

inline int checks = 0;
inline int failures = 0;

template <class... Values>
void check(const char* file, int line, const char* text, bool holds, const Values&... values) {
    ++checks;
    if (holds || ++failures > 20) return;  // the first twenty tell enough
    std::cerr << file << ':' << line << ": not so: " << text << ':';
    ((std::cerr << ' ' << values), ...);
    std::cerr << '\n';
}

inline int result() {
    std::cout << checks << " checks, " << failures << " failed\n";
    return failures == 0 && checks > 0 ? 0 : 1;
}

}  // namespace strata::test

// CHECK(condition, values to print where it does not hold...)
#define CHECK(...) ::strata::test::check(__FILE__, __LINE__, #__VA_ARGS__, __VA_ARGS__)

// The library's one way to say something: a line with a level, to whoever listens (Python's logging, once the package
// is imported), else to standard error.
#pragma once

#include <atomic>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "common/backend.hpp"

namespace strata::gpu {

inline std::atomic<LogSink> log_sink{nullptr};

inline void log_line(LogLevel level, const char* line) {
    if (const LogSink sink = log_sink.load()) {
        sink(level, line);
    } else {
        std::fprintf(stderr, "strata_ops: %s\n", line);
    }
}

// Lines that are collected under a lock and said after it: a listener may call back into the library.
class LogLines {
  public:
    template <class... Values>
    void add(LogLevel level, const char* format, Values... values) {
        char line[1024];
        std::snprintf(line, sizeof line, format, values...);
        lines_.emplace_back(level, line);
    }

    void say() {
        for (const auto& [level, line] : lines_) log_line(level, line.c_str());
        lines_.clear();
    }

  private:
    std::vector<std::pair<LogLevel, std::string>> lines_;
};

}  // namespace strata::gpu

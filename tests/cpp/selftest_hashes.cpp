// Makes or checks csrc/common/selftest_hashes.hpp, the CPU's answers to the self-test's cases.
//
//   selftest_hashes                checks the built-in table against this processor, on every path it has
//   selftest_hashes --write FILE   writes the table anew; a change of it is a change of kArithmeticVersion
#include "common/selftest_hashes.hpp"

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "common/selftest_cases.hpp"
#include "selftest_answers.hpp"

using namespace strata;

namespace {

struct Hashes {
    std::uint64_t of[kSelftestOutputs];
};

std::vector<Hashes> answers(const char* path) {
    test::SelftestCpu cpu;
    std::vector<Hashes> all;
    for (int index = 0; index < kSelftestCases; ++index) {
        const test::SelftestAnswer answer = cpu.read(selftest_case(index), path);
        Hashes hashes{};
        for (int i = 0; i < kSelftestOutputs; ++i) {
            if (answer.bytes[i] == 0) continue;
            std::uint64_t hash = kSelftestHashStart;
            for (std::int64_t at = 0; at < answer.bytes[i]; at += 4) {
                std::uint32_t word;
                std::memcpy(&word, answer.of[i].data() + at, sizeof word);
                hash = selftest_hash(hash, word);
            }
            hashes.of[i] = hash;
        }
        all.push_back(hashes);
    }
    return all;
}

int write(const char* file) {
    std::FILE* out = std::fopen(file, "w");
    if (out == nullptr) {
        std::perror(file);
        return 2;
    }
    std::fprintf(
        out,
        "// The CPU's answers to the self-test's cases, as hashes. Made by `make selftest-hashes`, proved by the\n"
        "// C++ test of that name; a GPU whose plain variant gives other bits is not used.\n"
        "#pragma once\n\n"
        "#include \"common/selftest_cases.hpp\"\n\n"
        "namespace strata {\n\n"
        "inline constexpr int kSelftestHashesVersion = %d;\n"
        "static_assert(kSelftestHashesVersion == kArithmeticVersion, \"make selftest-hashes\");\n\n"
        "// clang-format off\n"
        "inline constexpr std::uint64_t kSelftestHashes[kSelftestCases][kSelftestOutputs] = {\n",
        kArithmeticVersion);
    for (const Hashes& hashes : answers("portable")) {
        std::fprintf(out, "    {");
        for (int i = 0; i < kSelftestOutputs; ++i) {
            std::fprintf(out, "%s0x%016llxull", i == 0 ? "" : ", ", static_cast<unsigned long long>(hashes.of[i]));
        }
        std::fprintf(out, "},\n");
    }
    std::fprintf(out, "};\n// clang-format on\n\n}  // namespace strata\n");
    return std::fclose(out) == 0 ? 0 : 2;
}

int check() {
    int wrong = 0;
    const std::string paths = std::string(cpu::paths()) + ",";
    for (std::size_t begin = 0; begin < paths.size(); begin = paths.find(',', begin) + 1) {
        const std::string path = paths.substr(begin, paths.find(',', begin) - begin);
        const std::vector<Hashes> all = answers(path.c_str());
        for (int index = 0; index < kSelftestCases; ++index) {
            for (int i = 0; i < kSelftestOutputs; ++i) {
                if (all[static_cast<std::size_t>(index)].of[i] == kSelftestHashes[index][i]) continue;
                const SelftestCase c = selftest_case(index);
                std::printf("%s: T=%d %s fold=%d inject=%d q8_1=%d: %s differs from the table\n", path.c_str(),
                            c.tokens, stream_name(c.stream_type), c.fold, c.inject, c.q8_1, kSelftestOutputNames[i]);
                ++wrong;
            }
        }
        std::printf("%s: %d cases\n", path.c_str(), kSelftestCases);
    }
    return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc == 3 && std::strcmp(argv[1], "--write") == 0) return write(argv[2]);
    if (argc != 1) {
        std::fprintf(stderr, "usage: selftest_hashes [--write FILE]\n");
        return 2;
    }
    return check();
}

#include "sim/source_line.hpp"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <vector>

namespace strata::sim {
namespace {

// What `command` writes, line by line. The shell sees only the path of a loaded library and a number.
std::vector<std::string> lines_of(const std::string& command) {
    std::vector<std::string> lines;
    FILE* pipe = popen(command.c_str(), "r");
    if (pipe == nullptr) return lines;
    char buffer[4096];
    while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) {
        std::string line(buffer);
        while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
        if (!line.empty()) lines.push_back(line);
    }
    pclose(pipe);
    return lines;
}

std::string quoted(std::string_view text) {
    std::string out = "'";
    for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return out + "'";
}

struct Found {
    std::vector<std::string> lines;  // function, place, function, place, ... from the innermost out
    std::string fallback;
};

Found look_up(std::uintptr_t address) {
    Dl_info info{};
    if (dladdr(reinterpret_cast<const void*>(address), &info) == 0 || info.dli_fname == nullptr) {
        return {{}, "an address in no library"};
    }
    char offset[32];
    std::snprintf(offset, sizeof offset, "0x%llx",
                  static_cast<unsigned long long>(address - reinterpret_cast<std::uintptr_t>(info.dli_fbase)));
    const std::string file = quoted(info.dli_fname);
    Found found;
    found.lines = lines_of("addr2line -i -f -C -e " + file + " " + offset + " 2>/dev/null");
    if (found.lines.empty()) {
        found.lines = lines_of("llvm-symbolizer --obj=" + file + " " + offset + " 2>/dev/null");
    }
    const char* slash = std::strrchr(info.dli_fname, '/');
    found.fallback = std::string(slash != nullptr ? slash + 1 : info.dli_fname) + "+" + offset +
                     " (install binutils: addr2line turns this into a source line)";
    return found;
}

// "csrc/gpu/up.cuh:98" of "/anywhere/csrc/gpu/up.cuh:98:7 (discriminator 3)".
std::string tidy(std::string place) {
    place = project_path(place.substr(0, place.find(" (")));
    const std::size_t colon = place.find(':');
    if (colon == std::string::npos) return place;
    return place.substr(0, place.find(':', colon + 1));
}

bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// The vendor header's one-line functions stand between a kernel and the card; nobody looks for an error there.
bool is_kernel_source(const std::string& place) {
    const std::string_view file = std::string_view(place).substr(0, place.find(':'));
    return !ends_with(file, "gpu/vendor/sim.hpp") && file.find("??") == std::string_view::npos;
}

}  // namespace

std::string project_path(const std::string& path) {
    for (const char* root : {"/csrc/", "/tests/"}) {
        const std::size_t at = path.rfind(root);
        if (at != std::string::npos) return path.substr(at + 1);
    }
    return path;
}

std::string source_line(const void* return_address) {
    const Found found = look_up(reinterpret_cast<std::uintptr_t>(return_address) - 1);
    std::string text;
    for (std::size_t i = 1; i < found.lines.size(); i += 2) {
        const std::string place = tidy(found.lines[i]);
        if (is_kernel_source(place)) text += (text.empty() ? "" : ", in ") + place;
    }
    if (!text.empty()) return text;
    return found.lines.size() > 1 && found.lines[1].find("??") == std::string::npos ? tidy(found.lines[1])
                                                                                    : found.fallback;
}

std::string function_name(const void* entry) {
    const Found found = look_up(reinterpret_cast<std::uintptr_t>(entry));
    if (found.lines.empty() || found.lines[0].find("??") != std::string::npos) return found.fallback;
    // Of an entry that begins with an inlined call, the kernel is the outermost function.
    std::string name = found.lines[found.lines.size() >= 2 ? found.lines.size() - 2 : 0];
    int depth = 0;  // the argument list is the parenthesis outside of template arguments
    std::size_t end = name.size();
    for (std::size_t i = 0; i < name.size(); ++i) {
        if (name[i] == '<') ++depth;
        if (name[i] == '>') --depth;
        if (name[i] == '(' && depth == 0 && name.compare(i, 11, "(anonymous ") != 0) {
            end = i;
            break;
        }
    }
    name = name.substr(0, end);
    for (const char* prefix : {"void ", "strata::gpu::", "(anonymous namespace)::"}) {
        if (name.compare(0, std::strlen(prefix), prefix) == 0) name = name.substr(std::strlen(prefix));
    }
    return name;
}

}  // namespace strata::sim

// What an architecture name says. P4 may be asked for on exactly gfx1200 and gfx1201.
#pragma once

#include <string_view>

namespace strata {

// `name` as the runtime gives it: the processor, then any number of ":feature" suffixes ("gfx1201:sramecc-:xnack-").
constexpr std::string_view arch_processor(std::string_view name) { return name.substr(0, name.find(':')); }

constexpr bool arch_feature_is_wellformed(std::string_view feature) {
    if (feature.empty()) return false;
    for (char c : feature) {
        const bool known = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '+' || c == '_';
        if (!known) return false;
    }
    return true;
}

constexpr bool arch_is_gfx12(std::string_view name) {
    const std::string_view processor = arch_processor(name);
    if (processor != "gfx1200" && processor != "gfx1201") return false;
    std::string_view rest = name.substr(processor.size());
    while (!rest.empty()) {
        rest.remove_prefix(1);  // the colon
        const std::string_view feature = rest.substr(0, rest.find(':'));
        if (!arch_feature_is_wellformed(feature)) return false;
        rest.remove_prefix(feature.size());
    }
    return true;
}

static_assert(arch_is_gfx12("gfx1200") && arch_is_gfx12("gfx1201"));
static_assert(arch_is_gfx12("gfx1201:sramecc-:xnack-"));
static_assert(!arch_is_gfx12("gfx12") && !arch_is_gfx12("gfx12010") && !arch_is_gfx12("gfx1250"));
static_assert(!arch_is_gfx12("gfx12-generic") && !arch_is_gfx12("GFX1201") && !arch_is_gfx12(" gfx1201"));
static_assert(!arch_is_gfx12("gfx1201 ") && !arch_is_gfx12("") && !arch_is_gfx12("sm_120"));
static_assert(!arch_is_gfx12("gfx1201:") && !arch_is_gfx12("gfx1201: xnack-") && !arch_is_gfx12("gfx1201::xnack-"));

}  // namespace strata

// Which architecture names may ask for P4: gfx1200 and gfx1201, each with or without feature suffixes, nothing else.
#include "common/arch.hpp"

#include <string>

#include "check.hpp"

using strata::arch_is_gfx12;

int main() {
    const std::string suffixes[] = {"",         ":xnack-", ":xnack+", ":sramecc-", ":sramecc+", ":sramecc+:xnack-",
                                    ":feature", ":a:b:c",  ":x1+"};
    for (const std::string& suffix : suffixes) {
        for (const char* name : {"gfx1200", "gfx1201"}) CHECK(arch_is_gfx12(name + suffix), name + suffix);
        for (const char* name : {"gfx12", "gfx120", "gfx1202", "gfx1250", "gfx1251", "gfx12-generic", "gfx12010",
                                 "gfx1100", "gfx1151", "gfx942", "gfx90a", "sm_120", "sm_1200", "1200", ""}) {
            CHECK(!arch_is_gfx12(name + suffix), name + suffix);
        }
    }
    for (const char* name : {"GFX1200",
                             "Gfx1201",
                             "gFX1200",
                             "gfx1200 ",
                             " gfx1201",
                             "gfx 1200",
                             "gfx1201\n",
                             "\tgfx1200",
                             "gfx1200:",
                             "gfx1200::xnack-",
                             "gfx1200:xnack-:",
                             "gfx1200: xnack-",
                             "gfx1200:xnack- ",
                             "gfx1200:XNACK-",
                             "gfx1200;xnack-",
                             "gfx1200-xnack",
                             "gfx1200+",
                             "gfx1201,gfx1200",
                             "amdgcn-amd-amdhsa--gfx1201",
                             "gfx1201.gfx1201"}) {
        CHECK(!arch_is_gfx12(name), name);
    }
    CHECK(!arch_is_gfx12(std::string_view("gfx1200\0", 8)));

    // Every processor of three or four hexadecimal digits.
    int accepted = 0;
    const std::string digits = "0123456789abcdef";
    for (int number = 0; number < 16 * 16 * 16 * 16; ++number) {
        std::string name = "gfx";
        for (int place = 12; place >= 0; place -= 4) name += digits[static_cast<std::size_t>(number >> place & 15)];
        accepted += arch_is_gfx12(name);
        accepted += arch_is_gfx12("gfx" + name.substr(4));
    }
    CHECK(accepted == 2, accepted);
    return strata::test::result();
}

// Hashes against the vectors of their standards.
#include "check.hpp"

using namespace corral::detail;

static std::string sha(const std::string& text) { return hex(text_of(Sha256().add(text).digest())); }
static std::string mac(const std::string& key, const std::string& text) { return hex(text_of(hmac_sha256(key, text))); }

TEST(sha_256) {
  CHECK_EQ(sha(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(sha("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(sha("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(sha(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(hmac_of_rfc_4231) {
  CHECK_EQ(mac(std::string(20, '\x0b'), "Hi There"), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(mac("Jefe", "what do ya want for nothing?"), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(mac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(crc_32) {
  CHECK_EQ(crc32(""), 0u);
  CHECK_EQ(crc32("123456789"), 0xCBF43926u);
}

TEST(splitmix_of_its_author) {
  CHECK_EQ(splitmix64(0), 0xE220A8397B1DCDAFu);
  CHECK_EQ(splitmix64(0x9E3779B97F4A7C15u), 0x6E789E6AA1B965F4u);  // the second number of seed 0
}

TEST(secrets_are_equal_or_not) {
  CHECK(same_secret("", "") && same_secret("abc", "abc"));
  CHECK(!same_secret("abc", "abd") && !same_secret("abc", "ab") && !same_secret("", "a"));
}

TEST(random_numbers_are_the_same_everywhere) {
  corral::Rng a(7), b(7), c(8);
  bool differ = false;
  double sum = 0;
  for (int i = 0; i < 10000; ++i) {
    double x = a.uni(-1, 1);
    CHECK(x == b.uni(-1, 1) && x >= -1 && x < 1);
    differ |= x != c.uni(-1, 1);
    sum += x;
    CHECK(a.below(3) == b.below(3) && c.below(3) < 3);
  }
  CHECK(differ && std::fabs(sum) < 300);
}

int main(int argc, char** argv) { return run_tests(argc, argv); }

// Included before every source of a wheel (-include): what is linked here with the libstdc++ of GCC 12 runs with that of GCC 11 too,
// as RHEL 9 and its like have it. Their glibc is 2.34, the oldest that Debian 12's compiler makes programs for.
//
// GCC 12 gave this function a second version, which differs in nothing but its noexcept. The first is in all libraries since.
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
